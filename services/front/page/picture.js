// The cache as a picture: a row for each layer, a cell for each expert. A cell's colour is its expert's heat; it flashes
// when the expert is read or evicted. A byte of the server's picture is 128 if the expert is resident, plus its heat
// from 0 to 127.

import { Palette } from "./palette.js";

const RESIDENT = 128;
const HOTTEST = 127;
const FLASH_MS = 900;
const GUTTER = 26; // left of the cells, for the layers' numbers
const READ = 1;
const EVICTED = 2;

export class Picture {
  /** `readout` says what is under the pointer or the cursor. */
  constructor(canvas, readout) {
    this.canvas = canvas;
    this.readout = readout;
    this.context = canvas.getContext("2d", { alpha: false });
    this.small = document.createElement("canvas"); // a pixel for each cell, which the large one shows enlarged
    this.cells = new Uint8Array(0);
    this.flashes = new Map(); // cell -> { kind, since }
    this.layers = this.backbone = this.experts = 0;
    this.cursor = -1;
    this.frame = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.lay()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("blur", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** Take in a picture: `cells` has `layers * experts` bytes, those of MTP blocks behind the `backbone` layers. What
      changed since the last one flashes. */
  show(layers, backbone, experts, cells) {
    const isNew = layers !== this.layers || experts !== this.experts;
    const before = this.cells;
    [this.layers, this.backbone, this.experts, this.cells] = [layers, backbone, experts, cells];
    if (isNew) {
      this.flashes.clear();
      this.cursor = -1;
      this.lay();
    } else {
      this.compare(before);
    }
    const resident = cells.reduce((sum, cell) => sum + (cell >= RESIDENT), 0);
    this.canvas.setAttribute("aria-label", `${resident} of ${cells.length} experts in memory, ${layers} layers`);
    if (this.cursor >= 0) this.tell();
  }

  compare(before) {
    const now = performance.now();
    const changed = this.calm.matches ? this.expire(now) : [];
    this.cells.forEach((cell, i) => {
      if (cell === before[i]) return;
      changed.push(i);
      if ((cell ^ before[i]) & RESIDENT) this.flashes.set(i, { kind: cell & RESIDENT ? READ : EVICTED, since: now });
    });
    this.paint(changed, now);
    if (!this.calm.matches) this.animate();
  }

  /** Forget flashes that are over; their cells. */
  expire(now) {
    const over = [...this.flashes.keys()].filter((i) => now - this.flashes.get(i).since > FLASH_MS);
    for (const i of over) this.flashes.delete(i);
    return over;
  }

  /** Colours changed. */
  restyle() {
    this.palette = null;
    this.lay();
  }

  /** Choose the size of the cells, in device pixels, and draw them all. */
  lay() {
    if (!this.experts || !this.canvas.clientWidth) return;
    const style = getComputedStyle(this.canvas);
    this.palette ??= makePalette(style);
    const scale = devicePixelRatio;
    const width = Math.floor(this.canvas.clientWidth * scale);
    const tallest = (parseFloat(style.getPropertyValue("--tallest")) / 100) * innerHeight;
    const pitch = (this.canvas.clientWidth - GUTTER) / this.experts;
    const row = Math.max(2, Math.floor(Math.min(Math.max(pitch, 8), 26, tallest / this.layers) * scale));
    this.gutter = Math.floor(GUTTER * scale);
    this.edges = Array.from({ length: this.experts + 1 }, (_, i) =>
      this.gutter + Math.round((i * (width - this.gutter)) / this.experts),
    );
    this.row = row;
    this.gapX = pitch * scale >= 4 ? Math.max(1, Math.floor(scale)) : 0;
    this.gapY = row >= 4 ? Math.max(1, Math.floor(scale)) : 0;
    this.canvas.width = width;
    this.canvas.height = row * this.layers;
    this.canvas.style.height = `${(row * this.layers) / scale}px`;
    this.context.fillStyle = this.palette.ground;
    this.context.fillRect(0, 0, width, this.canvas.height);
    this.label(scale);
    [this.small.width, this.small.height] = [this.experts, this.layers];
    this.pixels = new ImageData(this.experts, this.layers);
    this.paint(this.cells.keys(), performance.now());
  }

  label(scale) {
    const size = Math.min(11 * scale, this.row * 1.4);
    const every = Math.ceil((size * 1.15) / this.row);
    this.context.fillStyle = this.palette.label;
    this.context.font = `${size}px system-ui, sans-serif`;
    this.context.textAlign = "right";
    this.context.textBaseline = "middle";
    for (let layer = 0; layer < this.layers; layer += every) {
      const name = layer < this.backbone ? layer : "MTP";
      this.context.fillText(name, this.gutter - 5 * scale, (layer + 0.5) * this.row, this.gutter - 6 * scale);
    }
  }

  /** Colour these cells and show the whole. */
  paint(cells, now) {
    const { data } = this.pixels;
    for (const i of cells) {
      const colour = this.palette.cells[this.cells[i]];
      const flash = this.flashes.get(i);
      const share = flash ? this.brightness(now - flash.since) : 0;
      const over = flash?.kind === READ ? this.palette.read : this.palette.evicted;
      for (let channel = 0; channel < 3; channel++) {
        data[4 * i + channel] = colour[channel] + share * (over[channel] - colour[channel]);
      }
      data[4 * i + 3] = 255;
    }
    this.small.getContext("2d").putImageData(this.pixels, 0, 0);
    this.enlarge();
  }

  /** Share of a flash's colour at this age: fading, or steady for those who want no motion. */
  brightness(age) {
    return this.calm.matches ? 1 : Math.max(0, 1 - age / FLASH_MS) ** 2;
  }

  enlarge() {
    const { context, canvas, gutter, row, edges, gapX, gapY } = this;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, gutter, 0, canvas.width - gutter, canvas.height);
    context.fillStyle = this.palette.ground;
    if (gapX) for (const edge of edges.slice(1)) context.fillRect(edge - gapX, 0, gapX, canvas.height);
    if (gapY) for (let y = row; y <= canvas.height; y += row) context.fillRect(gutter, y - gapY, canvas.width, gapY);
    if (this.cursor < 0) return;
    const [x, y] = [edges[this.cursor % this.experts], Math.floor(this.cursor / this.experts) * row];
    const width = edges[(this.cursor % this.experts) + 1] - x;
    context.strokeStyle = this.palette.label;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, Math.max(1, width - gapX - 2), row - gapY - 2);
  }

  /** Redraw what flashes until nothing does. */
  animate() {
    if (this.frame || !this.flashes.size) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      this.paint(this.flashes.keys(), now);
      this.expire(now);
      this.animate();
    });
  }

  // --- reading a cell ---

  cellAt(x, y) {
    const across = this.edges ? this.edges.findLastIndex((edge) => edge <= x * devicePixelRatio) : -1;
    const layer = Math.floor((y * devicePixelRatio) / this.row);
    const isInside = across >= 0 && across < this.experts && layer >= 0 && layer < this.layers;
    return isInside ? layer * this.experts + across : -1;
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.experts, ArrowDown: this.experts }[event.key];
    if (!step || !this.cells.length) return;
    event.preventDefault();
    const next = this.cursor < 0 ? 0 : this.cursor + step;
    if (next >= 0 && next < this.cells.length) this.point(next);
  }

  point(cell) {
    const before = this.cursor;
    if (cell === before || !this.pixels) return;
    this.cursor = cell;
    this.enlarge();
    this.tell();
  }

  tell() {
    if (this.cursor < 0) {
      this.readout.textContent = "";
      return;
    }
    const cell = this.cells[this.cursor];
    const where = cell >= RESIDENT ? "in memory" : "on disk";
    const heat = Math.round(((cell & HOTTEST) / HOTTEST) * 100);
    const [layer, expert] = [Math.floor(this.cursor / this.experts), this.cursor % this.experts];
    const name = layer < this.backbone ? `Layer ${layer}` : "MTP";
    this.readout.textContent = `${name}, expert ${expert}: ${where}, heat ${heat} of 100`;
  }
}

/** The colour of each of the 256 bytes, and of what else is drawn. The heat of an expert on disk is not shown. */
function makePalette(style) {
  const colours = new Palette(style);
  const absent = colours.channels("--absent");
  const heat = colours.scale(["--cold", "--warm", "--hot"], HOTTEST);
  return {
    cells: Array.from({ length: 256 }, (_, byte) => (byte >= RESIDENT ? heat[byte - RESIDENT] : absent)),
    ground: colours.get("--panel"),
    label: colours.get("--faint"),
    read: colours.channels("--read"),
    evicted: colours.channels("--evicted"),
  };
}
