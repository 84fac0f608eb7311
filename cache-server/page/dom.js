// Builds and updates elements. Text is always set as text, so a name is never read as HTML.

/** Returns an element with attributes and children: texts, elements, or nothing. */
export function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
        if (name.startsWith("on")) {
            element[name] = value;
        } else if (value !== undefined && value !== null && value !== false) {
            element.setAttribute(name, value === true ? "" : value);
        }
    }
    for (const child of children.flat(Infinity)) {
        if (child !== undefined && child !== null && child !== false) {
            element.append(child);
        }
    }
    return element;
}

/**
 * Makes an element equal to another one, and keeps nodes that stay: so a focus, a selection and a scroll
 * position outlive an update.
 */
export function patch(old, wanted) {
    if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName) {
        old.replaceWith(wanted);
        return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
        if (old.data !== wanted.data) {
            old.data = wanted.data;
        }
        return;
    }
    for (const { name } of [...old.attributes]) {
        if (!wanted.hasAttribute(name)) {
            old.removeAttribute(name);
        }
    }
    for (const { name, value } of wanted.attributes) {
        if (old.getAttribute(name) !== value) {
            old.setAttribute(name, value);
        }
    }
    old.onclick = wanted.onclick;
    old.onchange = wanted.onchange;
    const children = [...wanted.childNodes];
    while (old.childNodes.length > children.length) {
        old.lastChild.remove();
    }
    children.forEach((child, i) => {
        if (i < old.childNodes.length) {
            patch(old.childNodes[i], child);
        } else {
            old.append(child);
        }
    });
}

/** A number of the server, for people; its exact value is that of the element. */
export function number(text, value, name) {
    return h("data", { value: String(value ?? ""), "data-of": name }, text);
}

/** A bar of parts from 0 to 1, each `[class, part]`. The text beside it says the same. */
export function bar(label, ...parts) {
    const pieces = parts.map(([kind, part]) => {
        const piece = h("span", { class: `part ${kind}` });
        piece.setAttribute("data-part", Math.max(0, Math.min(1, part || 0)).toFixed(3));
        return piece;
    });
    return h("span", { class: "bar", role: "img", "aria-label": label }, pieces);
}

/** Sets the widths of bars: the policy of the page allows no style attributes. */
export function sizeBars(root) {
    for (const piece of root.querySelectorAll("[data-part]")) {
        const width = `${(Number(piece.dataset.part) * 100).toFixed(1)}%`;
        if (piece.style.width !== width) {
            piece.style.width = width;
        }
    }
}

/** A table. A column is `[title, cell of a row, class]`; on a narrow screen each row is a card. */
export function table(caption, columns, rows, empty) {
    const head = columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title));
    const body = rows.map((row) =>
        h(
            "tr",
            null,
            columns.map(([title, cell, kind], i) =>
                i === 0
                    ? h("th", { scope: "row", "data-title": title }, cell(row))
                    : h("td", { class: kind, "data-title": title }, cell(row)),
            ),
        ),
    );
    const none = h("tr", null, h("td", { colspan: columns.length, class: "none" }, empty));
    return h(
        "table",
        null,
        h("caption", null, caption),
        h("thead", null, h("tr", null, head)),
        h("tbody", null, rows.length ? body : none),
    );
}
