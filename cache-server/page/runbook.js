// Shows a runbook. Its Markdown is read line by line; everything else stays text.

import { readText } from "./access.js";
import { h, patch } from "./dom.js";

export function runbookView(name) {
    const slot = h("article");
    return {
        root: h("div", { class: "detail" }, slot),
        every: 0,
        async refresh() {
            patch(
                slot,
                h("article", null, markdown(await readText(`/runbooks/${encodeURIComponent(name)}`))),
            );
        },
    };
}

/** Code spans and strong text of a line; a link shows its text. */
function inline(text) {
    const plain = text.replace(/\[([^\]]+)\]\([^)]*\)/g, "$1");
    return plain
        .split(/(`[^`]+`|\*\*[^*]+\*\*)/)
        .filter(Boolean)
        .map((piece) => {
            if (piece.length > 2 && piece.startsWith("`")) {
                return h("code", null, piece.slice(1, -1));
            }
            return piece.length > 4 && piece.startsWith("**") ? h("strong", null, piece.slice(2, -2)) : piece;
        });
}

const BLOCKS = [
    ["code", /^```/],
    ["heading", /^#{1,4} /],
    ["item", /^\s*(?:[-*]|\d+\.) /],
    ["row", /^\|/],
    ["blank", /^\s*$/],
];

export function markdown(text) {
    const out = [];
    const lines = text.split("\n");
    const kindOf = (line) => BLOCKS.find(([, form]) => form.test(line))?.[0] ?? "text";
    for (let i = 0; i < lines.length;) {
        const kind = kindOf(lines[i]);
        const from = i;
        i += 1;
        if (kind === "code") {
            while (i < lines.length && !lines[i].startsWith("```")) {
                i += 1;
            }
            out.push(h("pre", { tabindex: 0 }, h("code", null, lines.slice(from + 1, i).join("\n"))));
            i += 1;
        } else if (kind === "heading") {
            const [, marks, words] = /^(#+) (.*)/.exec(lines[from]);
            out.push(h(`h${marks.length}`, null, inline(words)));
        } else if (kind === "row") {
            while (i < lines.length && kindOf(lines[i]) === "row") {
                i += 1;
            }
            out.push(rows(lines.slice(from, i)));
        } else if (kind === "item") {
            while (i < lines.length && ["item", "text"].includes(kindOf(lines[i]))) {
                i += 1;
            }
            out.push(list(lines.slice(from, i), kindOf));
        } else if (kind === "text") {
            while (i < lines.length && kindOf(lines[i]) === "text") {
                i += 1;
            }
            out.push(h("p", null, inline(lines.slice(from, i).join(" "))));
        }
    }
    return out;
}

function list(lines, kindOf) {
    const items = [];
    for (const line of lines) {
        if (kindOf(line) === "item") {
            items.push(line.replace(/^\s*(?:[-*]|\d+\.) /, ""));
        } else {
            items[items.length - 1] += ` ${line.trim()}`;
        }
    }
    return h(
        /^\s*\d/.test(lines[0]) ? "ol" : "ul",
        null,
        items.map((item) => h("li", null, inline(item))),
    );
}

function rows(lines) {
    const cells = (line) =>
        line
            .replace(/^\||\|\s*$/g, "")
            .split("|")
            .map((cell) => inline(cell.trim()));
    const body = lines.slice(2).map((line) =>
        h(
            "tr",
            null,
            cells(line).map((cell) => h("td", null, cell)),
        ),
    );
    return h(
        "table",
        null,
        h(
            "thead",
            null,
            h(
                "tr",
                null,
                cells(lines[0]).map((cell) => h("th", { scope: "col" }, cell)),
            ),
        ),
        h("tbody", null, body),
    );
}
