// Looks at the admin page in a real browser, and prints what it saw as JSON.
//
//     FLETCH_PAGE_MODULES=DIR node look.mjs LOOKS
//
// DIR is where npm installed playwright-core; CHROMIUM names another browser than /usr/bin/chromium.
//
// LOOKS is a JSON list. A look has some of url, hash, width, dark, token, until, choose: [label, value], click,
// then and screenshot. It opens the page, enters the token, waits until the text `until` is shown, chooses or
// clicks something, waits for the text `then`, and takes a picture.

import { createRequire } from "node:module";
import { join } from "node:path";

const { chromium } = createRequire(join(process.env.FLETCH_PAGE_MODULES, "x"))("playwright-core");
const looks = JSON.parse(process.argv[2]);

const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
});

async function look({
    url,
    hash = "",
    width = 1280,
    dark = false,
    token,
    until,
    choose,
    click,
    then,
    screenshot,
}) {
    const seen = { errors: [], requests: [], bytes: 0, paint_ms: null, numbers: {} };
    const context = await browser.newContext({
        viewport: { width, height: 900 },
        colorScheme: dark ? "dark" : "light",
    });
    const page = await context.newPage();
    page.on("console", (m) => ["error", "warning"].includes(m.type()) && seen.errors.push(m.text()));
    page.on("pageerror", (e) => seen.errors.push(String(e)));
    page.on("dialog", (d) => {
        seen.errors.push(`a dialog: ${d.message()}`);
        d.dismiss();
    });
    page.on("request", (r) => seen.requests.push(r.url()));
    const session = await context.newCDPSession(page);
    await session.send("Network.enable");
    session.on("Network.dataReceived", (e) => (seen.bytes += e.dataLength));
    try {
        await page.goto(`${url}/${hash}`);
        if (token) {
            await page.getByLabel("Token").fill(token);
            await page.keyboard.press("Enter");
        }
        const shown = (text) =>
            page.waitForFunction((t) => document.body?.innerText.includes(t), text, { timeout: 15000 });
        await shown(until);
        seen.shown_ms = await page.evaluate(() => performance.now());
        seen.weight = seen.bytes;
        // The keyboard goes on from the content.
        await page.keyboard.press("Tab");
        seen.focus = await page.evaluate(() => document.activeElement?.tagName ?? null);
        if (choose) {
            await page.getByLabel(choose[0]).selectOption(choose[1]);
            await shown(then);
        }
        if (click) {
            await page.getByRole("button", { name: click }).first().click();
            await shown(then);
        }
        seen.paint_ms = await page.evaluate(
            () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null,
        );
        // What the page shows, and whether it fits.
        Object.assign(
            seen,
            await page.evaluate(() => ({
                text: document.body.innerText,
                numbers: Object.fromEntries(
                    [...document.querySelectorAll("data[data-of]")].map((d) => [d.dataset.of, d.value]),
                ),
                too_wide: document.documentElement.scrollWidth > innerWidth,
                images: document.images.length,
                scripts: [...document.scripts].map((s) => s.getAttribute("src")),
                unnamed: [...document.querySelectorAll("a, button, select, input, [role=img]")].filter(
                    (e) => !(e.innerText || e.ariaLabel || e.labels?.length),
                ).length,
                headings: [...document.querySelectorAll("h1, h2")].map((e) => e.innerText || e.textContent),
                address: location.href,
            })),
        );
        if (screenshot) {
            await page.evaluate(() => document.activeElement?.blur());
            await page.screenshot({ path: screenshot, fullPage: true });
        }
    } catch (e) {
        seen.failed = `${e.message}\n${await page.evaluate(() => document.body.innerText).catch(() => "")}`;
    }
    await context.close();
    return seen;
}

const results = [];
for (const one of looks) {
    results.push(await look(one));
}
await browser.close();
console.log(JSON.stringify(results));
