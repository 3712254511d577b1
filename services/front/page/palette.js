// The page's colours as canvases need them: style sheets know names and themes, canvases only numbers.

const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

export class Palette {
  /** Colours are resolved for the element whose computed style this is. */
  constructor(style) {
    this.isDark = isDark(style);
    this.style = style;
  }

  /** A custom property's colour as a canvas takes it. */
  get(name) {
    return `rgb(${this.channels(name).join(", ")})`;
  }

  /** The same as red, green and blue from 0 to 255. */
  channels(name) {
    const value = this.style.getPropertyValue(name).trim();
    const pair = value.match(/^light-dark\(\s*([^,]+),\s*([^)]+)\)$/);
    probe.fillStyle = pair ? pair[this.isDark ? 2 : 1] : value;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }

  /** The channels of the colours from the first of these to the last, in `steps` steps. */
  scale(names, steps) {
    const stops = names.map((name) => this.channels(name));
    return Array.from({ length: steps + 1 }, (_, step) => {
      const at = (step / steps) * (stops.length - 1);
      const i = Math.min(Math.floor(at), stops.length - 2);
      return stops[i].map((value, channel) => value + (stops[i + 1][channel] - value) * (at - i));
    });
  }
}

function isDark(style) {
  const scheme = style.colorScheme;
  if (scheme === "dark" || scheme === "light") return scheme === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}
