//! The admin page at `/` and the runbooks: fixed files that are part of the program.
//!
//! They hold no data, so that a browser gets them without a token; the page asks for the token and sends it
//! with its requests for data (`dashboard.rs`). The policy of these answers lets a page load from this server
//! only, and run no text of a name as code.

use super::error::{ApiError, ApiResult};
use axum::{
    extract::Path,
    http::{HeaderName, header},
    response::{IntoResponse as _, Response},
};
use fletch_api::{Code, dashboard::Alert, routes};
use rust_embed::Embed;

/// What a browser may load and run for the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src \
    'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

macro_rules! file {
    ($name:literal, $kind:expr) => {
        ($name, $kind, include_str!(concat!("../../page/", $name)))
    };
}

/// The files of the page.
const FILES: [(&str, &str, &str); 13] = [
    file!("icon.svg", IMAGE),
    file!("page.css", STYLE),
    file!("main.js", SCRIPT),
    file!("access.js", SCRIPT),
    file!("charts.js", SCRIPT),
    file!("dom.js", SCRIPT),
    file!("words.js", SCRIPT),
    file!("overview.js", SCRIPT),
    file!("job.js", SCRIPT),
    file!("dataset.js", SCRIPT),
    file!("runbook.js", SCRIPT),
    file!("vendor/uPlot.js", SCRIPT),
    file!("vendor/uPlot.css", STYLE),
];

/// The runbooks, whichever there are when the program is built.
#[derive(Embed)]
#[folder = "../docs/runbooks"]
#[include = "*.md"]
#[allow_missing = true]
struct Runbooks;

/// Whether a path is that of a file without data, which needs no token.
pub fn is_public(path: &str) -> bool {
    path == routes::PAGE || path.starts_with("/page/") || path.starts_with("/runbooks/")
}

fn answer(kind: &'static str, text: impl Into<axum::body::Body>) -> Response {
    let headers: [(HeaderName, &str); 6] = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // A new release has other files under the same names.
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    (headers, text.into()).into_response()
}

pub async fn page() -> Response {
    answer(HTML, include_str!("../../page/index.html"))
}

/// Returns a file of the page.
pub async fn file(Path(name): Path<String>) -> ApiResult {
    let found = FILES.iter().find(|(known, ..)| *known == name);
    let (_, kind, text) = found.ok_or_else(|| {
        ApiError::new(Code::NotFound, "the page has no such file", "open / and reload the page")
    })?;
    Ok(answer(kind, *text))
}

/// Returns the runbook of an alert, as Markdown.
pub async fn runbook(Path(name): Path<String>) -> ApiResult {
    // Only names of alerts reach the files.
    let known = Alert::ALL.into_iter().find(|alert| alert.as_str() == name);
    let text = known.and_then(|alert| Runbooks::get(&format!("{}.md", alert.as_str())));
    let text = text.ok_or_else(|| {
        ApiError::new(Code::NotFound, "there is no runbook of that name", "see docs/runbooks of this release")
    })?;
    Ok(answer(TEXT, text.data.into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_that_the_page_names_has_a_runbook() {
        for alert in Alert::ALL {
            let found = Runbooks::get(&format!("{}.md", alert.as_str()));
            let text = found.map(|f| String::from_utf8_lossy(&f.data).into_owned()).unwrap_or_default();
            assert!(text.starts_with("# "), "docs/runbooks/{}.md has no title", alert.as_str());
        }
    }

    #[test]
    fn the_page_is_small_and_names_no_other_host() {
        let page = include_str!("../../page/index.html");
        let all: Vec<_> =
            FILES.iter().map(|(name, _, text)| (*name, *text)).chain([("index", page)]).collect();
        let bytes: usize = all.iter().map(|(_, text)| text.len()).sum();
        assert!(bytes <= 150_000, "the files have {bytes} bytes");
        for (name, text) in all {
            let hosts = text.match_indices("://").filter(|(at, _)| {
                // The name space of SVG is no address, and the library names its home in a comment.
                let from = text[..*at].rfind(|c: char| !c.is_ascii_alphabetic()).map_or(0, |i| i + 1);
                let line = text[from..].lines().next().unwrap_or_default();
                !line.starts_with("http://www.w3.org/") && !line.starts_with("https://github.com/leeoniya")
            });
            assert_eq!(hosts.count(), 0, "{name} names another host");
            assert!(!text.contains("innerHTML") || name.starts_with("vendor/"), "{name} writes HTML");
        }
    }
}
