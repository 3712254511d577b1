"""Markdown on the page: the nodes, and that growing text ends as the whole one."""

import pytest
from helpers.browser import needs_chromium

pytestmark = [pytest.mark.system, needs_chromium]


def test_markdown_in_pieces_is_markdown_at_once(page):
    """Random documents in random pieces, rendered after each: the same nodes as all at once, and no word lost."""
    problems = page.driver.execute_async_script(
        """const done = arguments[0];
        import("/page/markdown.js").then(({ MarkdownView }) => {
          let seed = 7;
          const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
          const parts = "word |\\n|\\n\\n|# |- |1. |> |```|~~~py\\n|**|*|`|    |---|<b>".split("|");
          const show = (pieces, each) => {
            const parent = document.createElement("div"), view = new MarkdownView(parent);
            for (const piece of pieces) { view.append(piece); if (each) view.render(); }
            view.render();
            return parent;
          };
          const problems = [];
          for (let round = 0; round < 500; round++) {
            const text = Array.from({ length: random(40) }, () => parts[random(parts.length)]).join("");
            const pieces = [];
            for (let i = 0; i < text.length; ) pieces.push(text.slice(i, (i += 1 + random(5))));
            const [grown, whole] = [show(pieces, true), show([text], false)];
            if (grown.innerHTML !== whole.innerHTML) problems.push([text, grown.innerHTML, whole.innerHTML]);
            const count = (words) => words.split("word").length;
            if (count(whole.textContent) !== count(text)) problems.push([text, whole.textContent]);
          }
          done(problems);
        });"""
    )
    assert problems == []


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("## Head *it*", "<h3>Head <em>it</em></h3>"),
        ("- a\n- b\n  c\n\n2. d", '<ul><li>a</li><li>b\nc</li></ul><ol start="2"><li>d</li></ol>'),
        ("```py\n# x\n\n**y**\n```\nz", "<pre><small>py</small><code># x\n\n**y**</code></pre><p>z</p>"),
        ("2 * 3 * 4 and **a*b** `**`", "<p>2 * 3 * 4 and <strong>a*b</strong> <code>**</code></p>"),
        ("> a\n> b\n\n---", "<blockquote>a\nb</blockquote><hr>"),
        ("x **open", "<p>x **open</p>"),
    ],
)
def test_markdown(page, text, html):
    shown = page.driver.execute_async_script(
        """const [text, done] = arguments;
        import("/page/markdown.js").then(({ MarkdownView }) => {
          const parent = document.createElement("div"), view = new MarkdownView(parent);
          view.append(text); view.render(); done(parent.innerHTML);
        });""",
        text,
    )
    assert shown == html
