// Elements of the page, made and found.

export const at = (id) => document.getElementById(id);

/** A new element at the end of `parent`. */
export function element(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

/** A button that copies what `text()` returns, and shows that it did. */
export function copyButton(parent, label, text) {
  const button = element(parent, "button", "small", label);
  button.type = "button";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Copying is not allowed here";
    setTimeout(() => (button.textContent = label), 2000);
  });
  return button;
}

async function copy(text) {
  // The clipboard is there for pages over TLS and of this machine only; the old way serves the others.
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const box = element(document.body, "textarea", "", text);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  return copied;
}
