//! Names that left the tree, documents that it may not cite, and the files that answer a newcomer's
//! first questions. Every check is a function over text.

use crate::tree::{Language, language};
use proc_macro2::{TokenStream, TokenTree};
use std::str::FromStr;

/// Types that were renamed, each with the folder where the old name is banned (`""`: everywhere).
/// Elsewhere the same word may have its ordinary meaning.
pub const OLD_TYPES: &[(&str, &str)] = &[
    ("Wheel", ""),
    ("Flywheel", ""),
    ("Told", ""),
    ("Laid", ""),
    ("Opened", ""),
    ("Means", ""),
    ("JobMeans", ""),
    ("Standing", ""),
    ("Alone", ""),
    ("Sown", ""),
    ("Household", ""),
    ("Knobs", ""),
    ("SeatId", ""),
    ("Seat", ""),
    ("Owed", ""),
    ("Act", ""),
    ("Came", ""),
    ("Tape", ""),
    ("Played", ""),
    ("Turns", ""),
    ("Turn", ""),
    ("Fit", ""),
    ("Chapter", ""),
    ("Ahead", ""),
    ("Course", ""),
    ("Spot", ""),
    ("Differs", "crates/core/src/delivery/"),
    ("Shape", "crates/core/"),
    ("Line", "crates/core/"),
    ("Feed", "crates/core/"),
    ("Notes", "crates/core/"),
    ("Note", "crates/core/"),
    ("Door", "fuse-client/"),
    ("Guest", "fuse-client/"),
    ("Guests", "fuse-client/"),
    ("Host", "fuse-client/"),
    ("Grant", "fuse-client/"),
    ("Echo", "fuse-client/"),
    ("Known", "fuse-client/"),
    ("Place", "fuse-client/"),
];

/// Functions that were renamed.
pub const OLD_FUNCTIONS: &[&str] = &["foresee", "pay", "spot_of", "laid"];

/// Files and modules that were renamed, each with the folder where the old name is banned.
pub const OLD_FILES: &[(&str, &str)] = &[
    ("wheel", ""),
    ("elsewhere", ""),
    ("house", ""),
    ("attached", ""),
    ("door", ""),
    ("guests", ""),
    ("foresight", ""),
    ("tape", ""),
    ("seat", ""),
    ("told", ""),
    ("knobs", ""),
    ("turns", ""),
    ("standing", ""),
    ("owed", ""),
    ("means", ""),
    ("proven", ""),
    ("declared", ""),
    ("course", ""),
    ("ahead", ""),
    ("substitute", ""),
    ("keyed", ""),
    ("consumed", ""),
    ("line", "crates/core/"),
    ("shape", "crates/core/"),
    ("notes", "crates/core/"),
    ("fill", "cache-server/"),
    ("grant", "cache-server/src/http/"),
    ("notes", "cache-server/"),
    ("host", "fuse-client/"),
    ("place", "fuse-client/"),
    ("echo", "fuse-client/"),
    ("known", "fuse-client/"),
    ("grant", "fuse-client/"),
    ("place", "dataset-tools/"),
];

/// Documents that are no part of the repository, as they were cited.
pub const OUTSIDE: &[&str] =
    &["DESIGN §", "FACTS §", "DESIGN.md", "FACTS.md", "STYLE.md", "DESIGN's", "of FACTS"];

/// What CONTRIBUTING answers under "In which file".
pub const QUESTIONS: &[&str] = &[
    "eviction",
    "granting a lease",
    "the bytes of a sample",
    "whom a read of a chunk asks",
    "where a slow read waited",
    "adding an origin scheme",
    "a setting",
    "a command",
    "the FUSE read",
    "a metric",
    "an order",
    "durability of acks",
];

/// Returns the old names in a file: identifiers of its code, its names in code spans of comments and
/// documents, and its own path. Strings and the words of sentences are free.
#[must_use]
pub fn old_names(path: &str, text: &str) -> Vec<String> {
    let language = language(path);
    let mut out = Vec::new();
    if matches!(language, Language::Rust | Language::Python) {
        let parts = path.trim_end_matches(".pyi").trim_end_matches(".py").trim_end_matches(".rs").split('/');
        for part in parts.filter(|p| banned(OLD_FILES, p, path)) {
            out.push(format!("{path}:1: the file's old name {part}"));
        }
    }
    let idents = match language {
        Language::Rust => rust_idents(text),
        Language::Python => python_idents(text),
        Language::Markdown if path != "CHANGELOG.md" => code_spans(text),
        _ => Vec::new(),
    };
    let mut before = String::new();
    for (line, ident) in idents {
        let of_type = banned(OLD_TYPES, &ident, path);
        let of_function = matches!(before.as_str(), "fn" | "def") && OLD_FUNCTIONS.contains(&ident.as_str());
        let of_module = before == "mod" && banned(OLD_FILES, &ident, path);
        if of_type || of_function || of_module {
            out.push(format!("{path}:{line}: the old name {ident}"));
        }
        before = ident;
    }
    out
}

fn banned(list: &[(&str, &str)], name: &str, path: &str) -> bool {
    list.iter().any(|(old, under)| *old == name && path.starts_with(under))
}

/// Returns the identifiers of a Rust source in order, then those in code spans of its comments.
fn rust_idents(text: &str) -> Vec<(usize, String)> {
    fn walk(tokens: TokenStream, out: &mut Vec<(usize, String)>) {
        for t in tokens {
            match t {
                TokenTree::Ident(i) => out.push((i.span().start().line, i.to_string())),
                TokenTree::Group(g) => walk(g.stream(), out),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }
    let mut out = Vec::new();
    walk(TokenStream::from_str(text).unwrap_or_default(), &mut out);
    let comments: String =
        text.lines().map(|l| l.find("//").map_or("\n".to_owned(), |at| format!("{}\n", &l[at..]))).collect();
    out.extend(code_spans(&comments));
    out
}

/// Returns the words of a Python source outside strings and comments.
fn python_idents(text: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    let mut open: Option<&str> = None;
    for (i, line) in text.lines().enumerate() {
        let mut code = String::new();
        let mut rest = line;
        while !rest.is_empty() {
            let step = match open {
                Some(_) if rest.starts_with('\\') => 2,
                Some(quote) if rest.starts_with(quote) => {
                    open = None;
                    quote.len()
                }
                None if rest.starts_with('#') => break,
                None => match ["\"\"\"", "'''", "\"", "'"].into_iter().find(|q| rest.starts_with(q)) {
                    Some(quote) => {
                        open = Some(quote);
                        code.push(' ');
                        quote.len()
                    }
                    None => {
                        code.extend(rest.chars().next());
                        1
                    }
                },
                Some(_) => 1,
            };
            let end = rest.char_indices().nth(step).map_or(rest.len(), |(at, _)| at);
            rest = &rest[end..];
        }
        open = open.filter(|q| q.len() == 3);
        out.extend(words(&code).map(|w| (i + 1, w.to_owned())));
    }
    out
}

/// Returns the words inside code spans (one line each).
fn code_spans(text: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for span in line.split('`').skip(1).step_by(2) {
            out.extend(words(span).map(|w| (i + 1, w.to_owned())));
        }
    }
    out
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// Returns the references to documents outside the repository.
#[must_use]
pub fn outside_references(path: &str, text: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let shared = line.match_indices("shared/").any(|(at, m)| {
            let before = line[..at].chars().next_back();
            let after = line[at + m.len()..].chars().next();
            let below = before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-'));
            let inside = before == Some('/') && !line[..at].ends_with("../");
            !below && !inside && after.is_none_or(|c| c.is_uppercase() || !c.is_alphanumeric())
        });
        let cited = OUTSIDE.iter().find(|o| line.contains(*o)).copied();
        if let Some(what) = cited.or(shared.then_some("shared/")) {
            out.push(format!("{path}:{}: cites {what}, which is no part of the repository", i + 1));
        }
    }
    out
}

/// Reads the table of CONTRIBUTING's section "In which file": each question with the files named beside it.
#[must_use]
pub fn answers(contributing: &str) -> Vec<(String, Vec<String>)> {
    let section = contributing.split("\n## ").find(|s| s.starts_with("In which file")).unwrap_or("");
    let rows = section.lines().filter(|l| l.starts_with('|')).skip(2);
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|');
        let question = cells.next().unwrap_or("").trim().to_owned();
        let files = cells.next().unwrap_or("").split('`').skip(1).step_by(2).map(str::to_owned);
        (question, files.collect())
    })
    .collect()
}

/// Returns the paths in a document's code spans that do not exist: words with a `/` and no pattern in them.
#[must_use]
pub fn absent_paths(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let spans =
        text.lines().enumerate().flat_map(|(i, l)| l.split('`').skip(1).step_by(2).map(move |s| (i + 1, s)));
    let plain = |s: &str| s.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-'));
    let files = spans.filter(|(_, s)| s.contains('/') && !s.starts_with('/') && plain(s));
    let absent = files.filter(|(_, s)| !exists(s));
    absent.map(|(line, s)| format!("{path}:{line}: there is no {s}")).collect()
}

/// Returns the questions without an answer, and the answers that are no file.
#[must_use]
pub fn unanswered(contributing: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let answers = answers(contributing);
    let mut out = Vec::new();
    for q in QUESTIONS {
        match answers.iter().find(|(question, _)| question == q) {
            None => out.push(format!("CONTRIBUTING.md: no row for {q:?}")),
            Some((_, files)) if files.is_empty() => out.push(format!("CONTRIBUTING.md: no file for {q:?}")),
            Some((_, files)) => out.extend(
                files.iter().filter(|f| !exists(f)).map(|f| format!("CONTRIBUTING.md: {q:?}: no file {f}")),
            ),
        }
    }
    out
}
