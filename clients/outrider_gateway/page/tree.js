// The tree of one step: drafted tokens from left to right, the accepted path in the colour of drafted text.

const SVG = "http://www.w3.org/2000/svg";
const LINE = 22, GAP = 14, LONGEST = 12; // pixels between leaves, pixels between depths, characters of a token

/** A token as it is shown: spaces and line ends in sight, long ones cut. */
function shown(token) {
  const seen = token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
  return seen.length > LONGEST ? `${seen.slice(0, LONGEST - 1)}…` : seen;
}

/** Nodes with their parents and depths: the tree's rows, and the token of the model's own behind the accepted path. */
function nodesOf({ tokens, parents, accepted, next }) {
  const kept = new Set(accepted);
  const nodes = tokens.map((token, row) => ({
    token, parent: row ? parents[row] : -1, kind: row === 0 ? "root" : kept.has(row) ? "drafted" : "left",
  }));
  // It may be a drafted token that was not kept for want of room: it is drawn once more, as the model's own.
  if (next !== null) nodes.push({ token: next, parent: accepted.at(-1) ?? 0, kind: "own" });
  for (const node of nodes) {
    node.children = [];
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    if (node.parent >= 0) nodes[node.parent].children.push(node);
  }
  return nodes;
}

/** Gives each node a line: leaves one after the other, a parent that of its first child. */
function lined(node, from = 0) {
  node.line = from;
  let next = from;
  for (const child of node.children) next = lined(child, next);
  return Math.max(next, from + 1);
}

/** Draws `tree` into `parent`, in place of what was there. */
export function drawTree(parent, tree) {
  const nodes = nodesOf(tree);
  // What goes on is on top, so that the accepted path is a straight line.
  for (const node of nodes) node.children.sort((a, b) => goesOn(b) - goesOn(a));
  const lines = lined(nodes[0]);
  const canvas = document.createElement("div");
  canvas.className = "canvas";
  const edges = canvas.appendChild(document.createElementNS(SVG, "svg"));
  for (const node of nodes) {
    node.element = canvas.appendChild(document.createElement("span"));
    node.element.className = `node ${node.kind}`;
    node.element.textContent = shown(node.token);
    node.element.style.top = `${node.line * LINE}px`;
  }
  // Measured where they stand: the width of a depth is that of its longest token.
  parent.replaceChildren(canvas);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.element.offsetWidth);
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  for (const node of nodes) node.element.style.left = `${lefts[node.depth]}px`;
  canvas.style.height = `${lines * LINE}px`;
  canvas.style.width = `${lefts.at(-1) + widths.at(-1)}px`;
  for (const node of nodes.slice(1)) edges.append(edge(nodes[node.parent], node, lefts));
}

function goesOn(node) {
  return { drafted: 2, own: 1 }[node.kind] ?? 0;
}

function edge(from, to, lefts) {
  const line = document.createElementNS(SVG, "path");
  const [x, y] = [lefts[from.depth] + from.element.offsetWidth, (from.line + 0.45) * LINE];
  const [right, below] = [lefts[to.depth], (to.line + 0.45) * LINE];
  line.setAttribute("d", `M${x} ${y} H${right - GAP / 2} V${below} H${right}`);
  line.setAttribute("class", to.kind);
  return line;
}

/** The same in words. */
export function describeTree({ tokens, accepted, next }, step) {
  const path = [...accepted.map((row) => tokens[row]), ...(next === null ? [] : [next])];
  return `step ${step + 1}: ${tokens.length - 1} tokens drafted, ${accepted.length} accepted; it said “${path.join("")}”`;
}
