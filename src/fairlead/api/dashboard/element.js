// Elements and their text. Text only: nothing that a server or a model says is ever read as HTML.

/** A new element with attributes, and children that are elements or text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** Change what an element says, if it says something else: what is not touched is not drawn or read out again. */
export function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Change an attribute, if it has another value; null removes it. */
export function mark(target, attribute, value) {
  if (value === null) target.removeAttribute(attribute);
  else if (target.getAttribute(attribute) !== String(value)) target.setAttribute(attribute, value);
}
