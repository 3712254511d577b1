// Puts the page together.

import { onKeyNeeded, request } from "./api.js";
import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { bytes, count, percent } from "./format.js";
import { Picture } from "./picture.js";
import { readTools } from "./tools.js";
import { Rates, totalHitRate, watch } from "./watch.js";

const $ = (id) => document.getElementById(id);

// --- theme ---

const THEMES = { auto: "light dark", light: "light", dark: "dark" };
const canvases = [];

function setTheme(name) {
  document.documentElement.style.colorScheme = THEMES[name];
  $("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("icebox-theme", name);
  for (const canvas of canvases) canvas.restyle();
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const now = names.indexOf(localStorage.getItem("icebox-theme"));
  setTheme(names[(now + 1) % names.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => canvases.forEach((c) => c.restyle()));

// --- key ---

onKeyNeeded(
  () =>
    new Promise((resolve) => {
      const dialog = $("key-dialog");
      dialog.returnValue = "cancel";
      dialog.addEventListener(
        "close",
        () => {
          resolve(dialog.returnValue === "ok" ? $("key").value.trim() : null);
          $("key").value = "";
        },
        { once: true },
      );
      dialog.showModal();
    }),
);

// --- settings ---

const settings = { system: "", fields: {} };

$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").querySelector("form").addEventListener("submit", (event) => {
  const problem = $("settings-error");
  problem.hidden = true;
  try {
    const tools = readTools($("tools").value);
    const [temperature, limit] = [$("temperature").valueAsNumber, $("max-tokens").valueAsNumber];
    settings.system = $("system").value.trim();
    settings.fields = {
      ...(Number.isNaN(temperature) ? {} : { temperature }),
      ...(Number.isNaN(limit) ? {} : { max_tokens: limit }),
      ...(tools.length ? { tools } : {}),
    };
  } catch (error) {
    event.preventDefault();
    problem.textContent = `Tools: ${error.message}`;
    problem.hidden = false;
  }
});

// --- chat ---

const rates = new Rates();
const chat = new Chat($("log"), {
  system: () => settings.system,
  fields: () => ({ ...settings.fields, thinking: { type: $("thinking").checked ? "enabled" : "disabled" } }),
  cacheNow: () => rates.last,
  onBusy: (isBusy) => {
    $("send").hidden = isBusy;
    $("stop").hidden = !isBusy;
  },
});

function send() {
  const question = $("question").value.trim();
  if (!question || chat.running) return;
  $("question").value = "";
  fitQuestion();
  $("welcome")?.remove();
  chat.ask(question);
}

/** The field is as high as what is written in it; the style sheet ends its growth. */
function fitQuestion() {
  $("question").style.height = "auto";
  const border = $("question").offsetHeight - $("question").clientHeight;
  $("question").style.height = `${$("question").scrollHeight + border}px`;
}

$("question").addEventListener("input", fitQuestion);
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
});
$("stop").addEventListener("click", () => chat.stop());
const welcome = $("welcome");
$("new-chat").addEventListener("click", () => {
  chat.clear();
  $("log").append(welcome);
  $("question").focus();
});
$("suggestions").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  $("question").value = target.textContent;
  send();
});

// --- cache ---

const picture = new Picture($("picture"), $("readout"));
const hitChart = new Chart($("hit-rate-chart"), percent, 1);
const readChart = new Chart($("read-rate-chart"), (rate) => `${bytes(rate)}/s`);
canvases.push(picture, hitChart, readChart);
setTheme(localStorage.getItem("icebox-theme") in THEMES ? localStorage.getItem("icebox-theme") : "auto");

const STATES = {
  live: "live",
  waiting: "the expert service is silent",
  lost: "connection lost, trying again",
  refused: "needs an API key",
};

watch(
  (snapshot) => {
    rates.add(snapshot);
    const { values, labels } = snapshot;
    const cells = Uint8Array.from(atob(snapshot.picture), (c) => c.charCodeAt(0));
    picture.show(values.moe_layers, values.backbone_layers, values.experts, cells);
    const readRate = rates.perSecond("bytes_read");
    hitChart.add(snapshot.time_s, rates.hitRate);
    readChart.add(snapshot.time_s, readRate);
    $("hit-rate").textContent = percent(rates.hitRate);
    $("read-rate").textContent = readRate === null ? "-" : `${bytes(readRate)}/s`;
    $("policy").textContent = `policy ${labels.policy}`;
    showTotals({
      "experts in memory": `${count(values.slots_resident)} of ${count(values.moe_layers * values.experts)}`,
      "pool": `${count(values.slots_total)} slots, ${bytes(values.slots_total * values.record_bytes)}`,
      "hit rate since start": percent(totalHitRate(snapshot)),
      "misses": count(values.misses),
      "evictions": count(values.evictions),
      "read since start": bytes(values.bytes_read),
    });
  },
  (state) => {
    if ($("status").dataset.state === state) return;
    $("status").dataset.state = state;
    $("status").textContent = STATES[state];
    if (state === "live") showModel().catch(() => {}); // the next connection brings another chance
  },
);

async function showModel() {
  const models = await (await request("/v1/models")).json();
  $("model").textContent = models.data[0].id;
}

function showTotals(totals) {
  const list = $("totals");
  Object.entries(totals).forEach(([name, value], i) => {
    if (list.children.length <= i) {
      const entry = document.createElement("div");
      entry.append(document.createElement("dt"), document.createElement("dd"));
      list.append(entry);
    }
    const [term, detail] = list.children[i].children;
    if (term.textContent !== name) term.textContent = name;
    if (detail.textContent !== value) detail.textContent = value;
  });
}
