// One answer on the page while it comes: reasoning folded, text, tool calls, and what it cost.

import { MarkdownView, element } from "./markdown.js";
import { percent } from "./format.js";
import { callText, isWhole } from "./tools.js";

// How often a growing answer is drawn.
const DRAW_MS = 40;
// Over less time than this a speed says nothing.
const LEAST_S = 0.05;

export class AnswerView {
  constructor(parent) {
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.timer = 0;
    this.note = element("p", "waiting");
    this.note.className = "waiting";
    this.summary = element("summary");
    this.thoughts = element("div");
    this.folded = element("details", this.summary, this.thoughts);
    this.folded.className = "reasoning";
    this.folded.hidden = true;
    this.body = element("div");
    this.body.className = "text";
    this.callBox = element("div");
    this.callBox.className = "calls";
    this.footer = element("footer");
    this.node = element("article", this.note, this.folded, this.body, this.callBox, this.footer);
    this.node.className = "assistant";
    this.node.setAttribute("aria-busy", "true"); // read aloud once, when it is complete
    this.markdown = new MarkdownView(this.body);
    parent.append(this.node);
  }

  /** A place in the queue, as the server tells it. */
  queued(place) {
    this.note.textContent = place > 0 ? `waiting for ${place} other ${place === 1 ? "request" : "requests"}` : "waiting";
  }

  add(delta) {
    if (delta.reasoning_content) {
      this.thinkingSince ??= performance.now();
      this.reasoning += delta.reasoning_content;
    }
    if (delta.content) {
      this.endThinking();
      this.text += delta.content;
      this.markdown.append(delta.content);
    }
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    this.timer ||= setTimeout(() => this.draw(), DRAW_MS);
  }

  endThinking() {
    if (this.thinkingSince !== undefined) this.thoughtFor ??= (performance.now() - this.thinkingSince) / 1000;
  }

  addCall({ index, id, function: part }) {
    this.calls[index] ??= { id, type: "function", function: { name: part.name, arguments: "" } };
    this.calls[index].function.arguments += part.arguments ?? "";
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.note.hidden = Boolean(this.text || this.reasoning || this.calls.length);
    this.folded.hidden = !this.reasoning;
    this.summary.textContent = this.thoughtFor === undefined ? "Thinking" : `Thought for ${this.thoughtFor.toFixed(1)} s`;
    this.thoughts.textContent = this.reasoning;
    this.markdown.render();
    this.callBox.replaceChildren(...this.calls.map((call) => {
      const box = element("div", element("code", callText(call)));
      box.className = "call";
      return box;
    }));
  }

  /** The answer is over. `notes` are short texts on what it cost and how it ended. */
  end(notes) {
    this.endThinking();
    this.draw();
    this.note.hidden = true;
    this.node.setAttribute("aria-busy", "false");
    this.footer.append(element("span", notes.join(" · ")));
  }

  /** Half a call is nothing to run: what cut the answer off cut its arguments off too. */
  dropCutCall() {
    this.calls = this.calls.filter(isWhole);
  }

  /** It ended early: calls that are not complete count for nothing. */
  breakOff(note) {
    this.calls = [];
    this.end([note]);
  }

  /** Whether there is anything to keep. */
  get isEmpty() {
    return !this.text && !this.reasoning && !this.calls.length;
  }

  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }
}

/** What an answer cost. `usage` as the API counts it, seconds since the question, share of hits or null. */
export function costs(usage, firstS, totalS, hits) {
  const notes = [];
  if (usage) {
    const tokens = usage.completion_tokens;
    notes.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (tokens > 1 && totalS - firstS > LEAST_S) notes.push(`${((tokens - 1) / (totalS - firstS)).toFixed(1)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached) notes.push(`${cached} of ${usage.prompt_tokens} prompt tokens remembered`);
  }
  if (firstS !== null) notes.push(`first after ${firstS.toFixed(2)} s`);
  if (hits !== null) notes.push(`${percent(hits)} cache hits`);
  return notes;
}
