// A model's Markdown as DOM nodes. Its words only ever become text nodes: there is no HTML, no link and no image, so
// nothing that it writes can run, load or lead anywhere.

const FENCE = /^\s*(```+(?=[^`]*$)|~~~+)\s*(.*)/;
const HEADING = /^#{1,6}\s+/;
const BULLET = /^\s*[-*+]\s+/;
const NUMBER = /^\s*(\d{1,9})[.)]\s+/;
const QUOTE = /^\s*>\s?/;
const NAMES = { "*": "em", "**": "strong" };
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;

/** Shows growing text in `parent`. Blocks that are complete are made once; only the last is made again. */
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.text = "";
    this.settled = 0; // how many characters are in blocks that can change no more
    this.kept = 0; // and how many nodes show them
  }

  append(text) {
    this.text += text;
  }

  render() {
    while (this.parent.childNodes.length > this.kept) this.parent.lastChild.remove();
    const blocks = split(this.text.slice(this.settled));
    const last = blocks.at(-1);
    // Until its first line is complete the last block may still turn out to continue the one before.
    const isSure = last && this.text.slice(-last.length).trimStart().includes("\n");
    this.parent.append(...blocks.map(build));
    if (!isSure) return;
    for (const block of blocks.slice(0, -1)) this.settled += block.length;
    this.kept += blocks.length - 1;
  }
}

/** Blocks with their offsets: each is `{ kind, lines, length }`, and the lengths add up to the text's. */
export function split(text) {
  const blocks = [];
  let block = null;
  let pending = 0; // blank lines before the next block
  for (const raw of text.match(/[^\n]*\n|[^\n]+$/g) ?? []) {
    const line = raw.replace(/\n$/, "");
    if (block?.kind === "code" && !block.closed) {
      block.length += raw.length;
      if (closes(line.trim(), block.fence)) block.closed = true;
      else block.lines.push(line);
      continue;
    }
    if (!line.trim()) {
      if (block) block.length += raw.length;
      else pending += raw.length;
      if (block) block.ended = true;
      continue;
    }
    const kind = kindOf(line);
    const goesOn = block && block.kind === kind && !["code", "heading", "rule"].includes(kind) && (!block.ended || isList(kind));
    const isLazy = block && !block.ended && isList(block.kind) && kind === "paragraph"; // a line that belongs to an item
    if (goesOn || isLazy) {
      block.lines.push(line);
      block.ended = false;
    } else {
      block = { kind, lines: [line], length: pending, ended: false };
      pending = 0;
      if (kind === "code") {
        const [, fence, language] = line.match(FENCE);
        Object.assign(block, { fence, language, lines: [], closed: false });
      }
      blocks.push(block);
    }
    block.length += raw.length;
  }
  return blocks;
}

function kindOf(line) {
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (BULLET.test(line)) return "bullets";
  if (NUMBER.test(line)) return "numbers";
  if (QUOTE.test(line)) return "quote";
  return "paragraph";
}

const closes = (line, fence) => line.startsWith(fence) && !line.replaceAll(fence[0], "");
const isList = (kind) => kind === "bullets" || kind === "numbers";

function build({ kind, lines, language }) {
  switch (kind) {
    case "code":
      return element("pre", ...(language ? [element("small", language)] : []), element("code", lines.join("\n")));
    case "heading":
      return element("h3", ...inline(lines[0].replace(HEADING, "")));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", ...inline(lines.map((line) => line.replace(QUOTE, "")).join("\n")));
    case "bullets":
      return list("ul", lines, BULLET);
    case "numbers": {
      const made = list("ol", lines, NUMBER);
      made.start = Number(lines[0].match(NUMBER)[1]);
      return made;
    }
    default:
      return element("p", ...inline(lines.join("\n")));
  }
}

function list(name, lines, mark) {
  const items = [];
  for (const line of lines) {
    if (mark.test(line)) items.push(line.replace(mark, ""));
    else items[items.length - 1] += "\n" + line.trim();
  }
  return element(name, ...items.map((item) => element("li", ...inline(item))));
}

/** Code, strong and emphasis. Each kind of mark that has no partner is looked for once, so time grows with length only. */
function inline(text) {
  const nodes = [];
  const alone = new Set();
  let shown = 0;
  for (let i = 0; i < text.length; i++) {
    if (text[i] !== "`" && text[i] !== "*") continue;
    const mark = markAt(text, i);
    const from = i + mark.length;
    // A star with space after it opens nothing: `2 * 3` is no emphasis.
    const opens = !alone.has(mark) && (mark[0] === "`" || /\S/.test(text[from] ?? ""));
    const end = opens ? partner(text, mark, from) : -1;
    if (opens && end < 0) alone.add(mark);
    if (end > from) {
      const inside = text.slice(from, end);
      nodes.push(text.slice(shown, i), element(NAMES[mark] ?? "code", ...(mark in NAMES ? inline(inside) : [inside])));
      shown = end + mark.length;
    }
    i = Math.max(from, shown) - 1;
  }
  return [...nodes, text.slice(shown)];
}

/** A run of backquotes, or one or two stars. */
function markAt(text, i) {
  let end = i + 1;
  while (text[end] === text[i] && (text[i] === "`" || end < i + 2)) end++;
  return text.slice(i, end);
}

/** Where the mark that closes this one begins; -1 if there is none. A star with space before it closes nothing. */
function partner(text, mark, from) {
  let at = text.indexOf(mark, from);
  if (mark[0] === "`") return at;
  const isOther = () => mark === "*" && (text[at + 1] === "*" || text[at - 1] === "*");
  while (at >= 0 && (/\s/.test(text[at - 1]) || isOther())) at = text.indexOf(mark, at + 1);
  return at;
}

/** An element with children; text children become text nodes. */
export function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
