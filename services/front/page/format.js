// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const percent = (share) => (share === null ? "-" : `${(share * 100).toFixed(1)} %`);
export const count = (number) => Math.round(number).toLocaleString("en");

export function bytes(number) {
  const power = number < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(number) / 10));
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}
