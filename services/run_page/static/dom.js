// Elements of the page. Text always becomes text nodes, because a model's completions may contain markup.

/** Returns an element with properties (``class``, ``on...`` handlers, attributes) and children (nodes, text, null). */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Shows or hides an element. */
export function show(element, isShown) {
  element.hidden = !isShown;
}

/** Sets an element's text only if it differs, so as not to disturb selections and screen readers. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Returns text with every occurrence of ``needle`` marked, in any case. */
export function marked(text, needle) {
  if (!needle) return [text];
  const parts = [];
  const [haystack, wanted] = [text.toLowerCase(), needle.toLowerCase()];
  // Lower case may have another length; positions then differ, and nothing is marked.
  if (haystack.length !== text.length) return [text];
  let from = 0;
  for (let at = haystack.indexOf(wanted); at >= 0; at = haystack.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), h("mark", null, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  parts.push(text.slice(from));
  return parts;
}
