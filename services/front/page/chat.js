// The conversation: what was said, what is sent, and the log that shows both.

import { events, request } from "./api.js";
import { AnswerView, costs } from "./answer.js";
import { element } from "./markdown.js";
import { hitRate } from "./watch.js";
import { DECLINED, callText } from "./tools.js";

const NEAR_END_PX = 60;

export class Chat {
  /**
   * `system()` gives the system message, `fields()` what else a request says, `cacheNow()` the newest snapshot of the
   * cache; `onBusy(isBusy)` is told when an answer begins and ends.
   */
  constructor(log, { system, fields, cacheNow, onBusy }) {
    this.log = log;
    this.system = system;
    this.fields = fields;
    this.cacheNow = cacheNow;
    this.onBusy = onBusy;
    this.messages = [];
    this.running = null; // the AbortController of the answer that is coming
    this.pending = null; // { view, fields, form } of tool calls whose results are asked for
    this.isFollowing = true;
    log.addEventListener("scroll", () => {
      this.isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    });
    new MutationObserver(() => this.follow()).observe(log, { childList: true, subtree: true, characterData: true });
  }

  follow() {
    if (this.isFollowing) this.log.scrollTop = this.log.scrollHeight;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.pending = null;
    this.log.replaceChildren();
  }

  async ask(question) {
    this.log.querySelectorAll(".error, .again").forEach((node) => node.remove());
    this.declineCalls();
    this.dropUnanswered();
    this.messages.push({ role: "user", content: question });
    const shown = element("article", question);
    shown.className = "user";
    this.log.append(shown);
    this.isFollowing = true;
    await this.answer();
  }

  /** Ask for the answer to the messages so far. */
  async answer() {
    const messages = this.messages; // of another conversation, once this one was cleared
    const controller = (this.running = new AbortController());
    this.onBusy(true);
    const view = new AnswerView(this.log);
    let problem = null;
    try {
      view.end(await this.stream(view, controller.signal));
    } catch (error) {
      view.breakOff(controller.signal.aborted ? "stopped" : "broken off");
      if (!controller.signal.aborted) problem = error;
    } finally {
      if (this.running === controller) {
        this.running = null;
        this.onBusy(false);
      }
    }
    if (messages !== this.messages) return;
    if (!view.isEmpty) messages.push(view.message);
    if (view.calls.length) this.askResults(view);
    if (problem) this.showError(problem, view);
    else this.offerAgain(view);
  }

  /** Fill the view with the answer as it comes; what it cost in the end. */
  async stream(view, signal) {
    const before = this.cacheNow();
    const began = performance.now();
    const seconds = () => (performance.now() - began) / 1000;
    let [firstS, usage, reason] = [null, null, null];
    const body = { ...this.fields(), messages: this.sent(), stream: true, stream_options: { include_usage: true } };
    const headers = { "content-type": "application/json" };
    const response = await request("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const { data, comment } of events(response)) {
      if (comment?.startsWith("queue place=")) view.queued(Number(comment.slice(12)));
      if (data === undefined || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) firstS ??= seconds();
      view.add(choice.delta);
      reason = choice.finish_reason ?? reason;
    }
    if (reason === null) throw new Error("the connection ended before the answer did");
    view.dropCutCall();
    const notes = costs(usage, firstS, seconds(), hitRate(before, this.cacheNow()));
    return reason === "length" ? [...notes, "cut off at the longest length"] : notes;
  }

  sent() {
    const system = this.system();
    return system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
  }

  // --- tools ---

  askResults(view) {
    const fields = view.calls.map((call) => {
      const field = element("textarea");
      field.rows = 2;
      field.placeholder = "Result";
      field.setAttribute("aria-label", `Result of ${callText(call)}`);
      return field;
    });
    fields.forEach((field, i) => view.callBox.children[i].append(field));
    const send = element("button", fields.length > 1 ? "Send results" : "Send result");
    send.className = "main";
    const form = element("form", send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.giveResults(fields.map((field) => field.value));
      this.answer();
    });
    view.callBox.append(form);
    this.pending = { view, fields, form };
    fields.forEach((field, i) => field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (i < fields.length - 1) fields[i + 1].focus();
      else form.requestSubmit();
    }));
    fields[0].focus();
  }

  giveResults(results) {
    const { view, fields, form } = this.pending;
    this.pending = null;
    form.remove();
    this.log.querySelectorAll(".again").forEach((node) => node.remove());
    results.forEach((content, i) => {
      this.messages.push({ role: "tool", tool_call_id: view.calls[i].id, content });
      const shown = element("div", content);
      shown.className = "result";
      fields[i].replaceWith(shown);
    });
  }

  /** What could not be answered, perhaps because it is too long, must not spoil the next question. */
  dropUnanswered() {
    if (this.messages.at(-1)?.role !== "user") return;
    this.messages.pop();
    [...this.log.querySelectorAll(".user")].at(-1).classList.add("dropped");
  }

  /** A question instead of results: every call needs one before the conversation can go on. */
  declineCalls() {
    if (this.pending) this.giveResults(this.pending.fields.map(() => DECLINED));
  }

  // --- once more ---

  offerAgain(view) {
    const again = element("button", "Try again");
    again.type = "button";
    again.className = "again";
    again.addEventListener("click", () => this.again(view));
    if (view.text && navigator.clipboard) view.footer.append(copyButton(view.text)); // only where the page is secure
    view.footer.append(again);
  }

  again(view) {
    if (this.running) return;
    if (!view.isEmpty) this.messages.splice(this.messages.findLastIndex(({ role }) => role === "assistant"));
    this.pending = null;
    view.node.remove();
    this.answer();
  }

  showError(error, view) {
    if (view.isEmpty) view.node.remove();
    const retry = element("button", "Try again");
    retry.type = "button";
    const words = error instanceof TypeError ? "The server does not answer." : error.message;
    const box = element("div", element("span", words), retry);
    box.className = "error";
    box.setAttribute("role", "alert");
    retry.addEventListener("click", () => {
      box.remove();
      this.again(view);
    });
    this.log.append(box);
  }
}

function copyButton(text) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  return copy;
}
