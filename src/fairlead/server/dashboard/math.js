// Formulas in TeX's notation as MathML, for what models usually write. What is unknown is shown as it is written.

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const MAX_DEPTH = 40;
const MAX_CHARS = 4000;

const SYMBOLS = Object.fromEntries(Object.entries({
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", iota: "ι",
  kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ",
  chi: "χ", psi: "ψ", omega: "ω", Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ",
  Omega: "Ω", infty: "∞", partial: "∂", nabla: "∇", ell: "ℓ", hbar: "ℏ", Re: "ℜ", Im: "ℑ", emptyset: "∅", aleph: "ℵ", angle: "∠",
}).map(([name, text]) => [name, ["mi", text]]));
for (const [name, text] of Object.entries({
  times: "×", cdot: "⋅", div: "÷", pm: "±", mp: "∓", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", equiv: "≡",
  sim: "∼", propto: "∝", in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", supset: "⊃", cup: "∪", cap: "∩", setminus: "∖", to: "→",
  rightarrow: "→", leftarrow: "←", Rightarrow: "⇒", Leftarrow: "⇐", Leftrightarrow: "⇔", iff: "⇔", implies: "⇒", mapsto: "↦",
  forall: "∀", exists: "∃", neg: "¬", land: "∧", lor: "∨", wedge: "∧", vee: "∨", oplus: "⊕", otimes: "⊗", circ: "∘", ast: "∗",
  ldots: "…", dots: "…", cdots: "⋯", vdots: "⋮", sum: "∑", prod: "∏", int: "∫", oint: "∮", mid: "∣", parallel: "∥", perp: "⊥",
  langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", prime: "′", ll: "≪", gg: "≫",
})) SYMBOLS[name] = ["mo", text];
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min sup inf det gcd deg dim ker arg mod Pr".split(" "));
const LARGE = new Set(["∑", "∏"]);
const UNDER = new Set(["lim", "max", "min", "sup", "inf"]);
const ACCENTS = { hat: "^", bar: "‾", overline: "‾", vec: "→", tilde: "~", dot: "˙" };
const VARIANTS = { mathbf: "bold", mathrm: "normal", mathit: "italic", operatorname: "normal", boldsymbol: "bold", mathbb: "double-struck", mathcal: "script" };
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.3em", quad: "1em", qquad: "2em", "!": "0" };

function node(name, ...children) {
  const made = document.createElementNS(NAMESPACE, name);
  made.append(...children);
  return made;
}

/** Return a formula as an element. `isBlock`: it stands on a line of its own. */
export function formula(source, isBlock) {
  const made = node("math");
  if (isBlock) made.setAttribute("display", "block");
  if (source.length > MAX_CHARS) made.append(node("mtext", source));
  else made.append(new Parser(source, isBlock).row(() => false, 0));
  return made;
}

class Parser {
  constructor(source, isBlock) {
    this.tokens = source.match(/\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|[^\s]/gsu) ?? [];
    this.isBlock = isBlock;
    this.at = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  /** Read elements until `ends(token)`, which stays. */
  row(ends, depth) {
    const made = node("mrow");
    while (this.next !== undefined && !ends(this.next)) made.append(this.scripted(depth));
    return made;
  }

  /** Read an element with what is written above and below it. */
  scripted(depth) {
    const base = this.next === "_" || this.next === "^" ? node("mrow") : this.atom(depth);
    let [sub, sup] = [null, null];
    for (;;) {
      if (this.next === "_" && !sub) { this.at += 1; sub = this.argument(depth); }
      else if (this.next === "^" && !sup) { this.at += 1; sup = this.argument(depth); }
      else if (this.next === "'" && !sup) { this.at += 1; sup = node("mo", "′"); }
      else break;
    }
    if (!sub && !sup) return base;
    const isUnder = (this.isBlock && LARGE.has(base.textContent)) || UNDER.has(base.textContent);
    const [both, low, high] = isUnder ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (sub && sup) return node(both, base, sub, sup);
    return sub ? node(low, base, sub) : node(high, base, sup);
  }

  argument(depth) {
    return this.next === undefined ? node("mrow") : this.atom(depth + 1);
  }

  group(depth) {
    this.at += 1;
    const made = this.row((token) => token === "}", depth + 1);
    this.at += 1;
    return made;
  }

  atom(depth) {
    const token = this.next;
    if (depth > MAX_DEPTH) { this.at += 1; return node("mtext", token); }
    if (token === "{") return this.group(depth);
    this.at += 1;
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1), depth);
    if (/^[0-9]/.test(token)) return node("mn", token);
    if (/^\p{L}/u.test(token)) return node("mi", token);
    return node("mo", token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name, depth) {
    if (Object.hasOwn(SYMBOLS, name)) return node(...SYMBOLS[name]);
    if (FUNCTIONS.has(name)) return node("mi", name);
    if (name === "frac" || name === "dfrac" || name === "tfrac") return node("mfrac", this.argument(depth), this.argument(depth));
    if (name === "binom") return node("mrow", node("mo", "("), fractionWithoutLine(this.argument(depth), this.argument(depth)), node("mo", ")"));
    if (name === "sqrt") return this.root(depth);
    if (Object.hasOwn(ACCENTS, name)) return accented(this.argument(depth), ACCENTS[name]);
    if (name === "text" || name === "textbf" || name === "textit" || name === "mbox") return node("mtext", this.plain());
    if (Object.hasOwn(VARIANTS, name)) return varied(this.argument(depth), VARIANTS[name]);
    if (Object.hasOwn(SPACES, name)) return spaced(SPACES[name]);
    if (name === "left" || name === "right" || name === "big" || name === "Big") return this.delimiter();
    if (name === "begin") return this.environment(depth);
    if (name === "\\") return spaced("1em");
    if (/^[{}%$#&_|]$/.test(name)) return node("mo", name === "|" ? "‖" : name);
    return node("mtext", `\\${name}`);
  }

  root(depth) {
    if (this.next !== "[") return node("msqrt", this.argument(depth));
    this.at += 1;
    const index = this.row((token) => token === "]", depth + 1);
    this.at += 1;
    return node("mroot", this.argument(depth), index);
  }

  delimiter() {
    const token = this.next;
    this.at += token === undefined ? 0 : 1;
    if (token === undefined || token === ".") return node("mrow");
    if (token.startsWith("\\")) return this.command(token.slice(1), MAX_DEPTH);
    return node("mo", token);
  }

  /** Read a group as text. */
  plain() {
    if (this.next !== "{") return this.tokens[this.at++] ?? "";
    const from = this.at + 1;
    while (this.next !== undefined && this.next !== "}") this.at += 1;
    return this.tokens.slice(from, this.at++).join("").replace(/\\ /g, " ");
  }

  environment(depth) {
    const name = this.plain();
    const table = node("mtable");
    const ends = (token) => token === "&" || token === "\\\\" || token === "\\end";
    while (this.next !== undefined && this.next !== "\\end") {
      const row = node("mtr");
      do {
        if (this.next === "&") this.at += 1;
        row.append(node("mtd", this.row(ends, depth + 1)));
      } while (this.next === "&");
      table.append(row);
      if (this.next === "\\\\") this.at += 1;
    }
    if (this.next === "\\end") { this.at += 1; this.plain(); }
    const [open, close] = { pmatrix: "()", bmatrix: "[]", vmatrix: "||", cases: "{ " }[name] ?? "  ";
    return node("mrow", ...(open === " " ? [] : [node("mo", open)]), table, ...(close === " " ? [] : [node("mo", close)]));
  }
}

function fractionWithoutLine(above, below) {
  const made = node("mfrac", above, below);
  made.setAttribute("linethickness", "0");
  return made;
}

function accented(base, accent) {
  const made = node("mover", base, node("mo", accent));
  made.setAttribute("accent", "true");
  return made;
}

function varied(base, variant) {
  if (variant === "bold") base.style.fontWeight = "bold";
  else if (variant === "normal") for (const letter of [base, ...base.querySelectorAll("mi")]) letter.setAttribute("mathvariant", "normal");
  return base;
}

function spaced(width) {
  const made = node("mspace");
  made.setAttribute("width", width);
  return made;
}
