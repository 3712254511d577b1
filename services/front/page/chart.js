// A small chart of one number over the last two minutes.

import { Palette } from "./palette.js";

const SPAN_S = 120;

export class Chart {
  /** `format` writes a value; `top` is the highest value shown, or null to follow the values. */
  constructor(canvas, format, top = null) {
    this.canvas = canvas;
    this.format = format;
    this.context = canvas.getContext("2d");
    this.top = top;
    this.points = []; // [seconds, value or null where there was nothing to measure]
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  add(seconds, value) {
    this.points.push([seconds, value]);
    while (this.points[0][0] < seconds - SPAN_S) this.points.shift();
    this.draw();
  }

  restyle() {
    this.palette = null;
    this.draw();
  }

  draw() {
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth || !clientHeight) return;
    this.palette ??= makePalette(getComputedStyle(this.canvas));
    const scale = devicePixelRatio;
    const width = (this.canvas.width = Math.round(clientWidth * scale));
    const height = (this.canvas.height = Math.round(clientHeight * scale));
    const highest = this.top ?? Math.max(1, ...this.points.map(([, value]) => value ?? 0));
    const now = this.points.at(-1)?.[0] ?? 0;
    const x = (seconds) => width - ((now - seconds) / SPAN_S) * width;
    const y = (value) => height - scale - (value / highest) * (height - 3 * scale);
    this.grid(width, height, scale);
    for (const run of runs(this.points)) this.line(run, x, y, height, scale);
    this.context.fillStyle = this.palette.label;
    this.context.font = `${10 * scale}px system-ui, sans-serif`;
    this.context.fillText(this.format(highest), 5 * scale, 13 * scale);
  }

  grid(width, height, scale) {
    this.context.strokeStyle = this.palette.line;
    this.context.lineWidth = scale;
    this.context.strokeRect(scale / 2, scale / 2, width - scale, height - scale);
  }

  line(run, x, y, height, scale) {
    this.context.beginPath();
    for (const [seconds, value] of run) this.context.lineTo(x(seconds), y(value));
    this.context.strokeStyle = this.palette.curve;
    this.context.lineWidth = 1.5 * scale;
    this.context.lineJoin = "round";
    this.context.stroke();
    this.context.lineTo(x(run.at(-1)[0]), height);
    this.context.lineTo(x(run[0][0]), height);
    this.context.globalAlpha = 0.15;
    this.context.fillStyle = this.palette.curve;
    this.context.fill();
    this.context.globalAlpha = 1;
  }
}

/** The stretches without a gap. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

function makePalette(style) {
  const colours = new Palette(style);
  return { line: colours.get("--line"), curve: colours.get("--accent"), label: colours.get("--faint") };
}
