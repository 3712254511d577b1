// The page's colours as canvases need them: style sheets know names and themes, canvases only numbers.

const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

export class Palette {
  /** Colours are resolved for the element whose computed style this is. */
  constructor(style) {
    this.isDark = isDark(style);
    this.style = style;
  }

  /** A custom property's colour as `rgb(r, g, b)`. */
  get(name) {
    return text(this.channels(name));
  }

  /** A colour between a list of them, at `share` from 0 to 1. */
  blend(names, share) {
    const at = share * (names.length - 1);
    const i = Math.min(Math.floor(at), names.length - 2);
    return text(between(this.channels(names[i]), this.channels(names[i + 1]), at - i));
  }

  /** A colour with `share` of another, which is given as `rgb(...)`. */
  mix(name, other, share) {
    return text(between(this.channels(name), other.match(/\d+/g).map(Number), share));
  }

  channels(name) {
    const value = this.style.getPropertyValue(name).trim();
    const pair = value.match(/^light-dark\(\s*([^,]+),\s*([^)]+)\)$/);
    probe.fillStyle = pair ? pair[this.isDark ? 2 : 1] : value;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }
}

function isDark(style) {
  const scheme = style.colorScheme;
  if (scheme === "dark" || scheme === "light") return scheme === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

const between = (one, other, share) => one.map((value, i) => Math.round(value + (other[i] - value) * share));
const text = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;
