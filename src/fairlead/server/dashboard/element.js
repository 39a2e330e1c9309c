// Elements and their text. Text of a server or a model is never parsed as HTML.

/** Return a new element with attributes, and children that are elements or text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** Set an element's text if it differs: an untouched element is not drawn or read out again. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Set an attribute if it differs; null removes it. */
export function setAttribute(target, attribute, value) {
  if (value === null) target.removeAttribute(attribute);
  else if (target.getAttribute(attribute) !== String(value)) target.setAttribute(attribute, value);
}
