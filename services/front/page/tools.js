// Tool calls as people read them.

export const DECLINED = "The user did not run this call.";

/** A call as one line of code, such as `weather(city="Oslo", days=3)`. */
export function callText({ function: { name, arguments: text } }) {
  try {
    const pairs = Object.entries(JSON.parse(text)).map(([key, value]) => `${key}=${JSON.stringify(value)}`);
    return `${name}(${pairs.join(", ")})`;
  } catch {
    return `${name}(${text})`; // not complete, or no JSON: as the model wrote it
  }
}

/** Whether its arguments have come to their end. */
export function isWhole({ function: { arguments: text } }) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The definitions in this text. Throws an Error that says what is wrong. */
export function readTools(text) {
  if (!text.trim()) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error("tools must be a list");
  tools.forEach((tool, i) => {
    if (typeof tool?.function?.name !== "string") throw new Error(`tool ${i} has no function.name`);
  });
  return tools;
}
