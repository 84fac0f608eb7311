//! The limits of lines, paragraphs and sentences, as functions over text.
//!
//! Every function returns its offences as `file:line: what`. Tables, links and code inside documents are
//! outside the limits of paragraphs and sentences; links are outside the limit of lines.

use crate::tree::{Language, language};

/// Characters in a line of code or of a document.
pub const LINE_CHARS_MAX: usize = 110;
/// Lines in a paragraph of a document or of a comment.
pub const PARAGRAPH_LINES_MAX: usize = 6;
/// Words in a sentence of a document.
pub const SENTENCE_WORDS_MAX: usize = 40;

/// Abbreviations whose full stop ends no sentence.
const ABBREVIATIONS: &[&str] = &["e.g.", "i.e.", "cf.", "vs.", "etc.", "approx.", "no."];

/// Returns the lines of more than [`LINE_CHARS_MAX`] characters. Targets of links, and rows of tables in
/// documents and comments, are not counted.
#[must_use]
pub fn long_lines(path: &str, text: &str) -> Vec<String> {
    let language = language(path);
    if language == Language::Other {
        return Vec::new();
    }
    let too_long = |line: &str| {
        let content = comment_text(language, line).unwrap_or(line).trim_start();
        let table = is_table(content) && (language == Language::Markdown || content.len() < line.len());
        !table && without_links(line).chars().count() > LINE_CHARS_MAX
    };
    let lines = text.lines().enumerate().filter(|(_, l)| too_long(l));
    lines.map(|(i, l)| format!("{path}:{}: {} characters", i + 1, l.chars().count())).collect()
}

/// Returns the paragraphs of a document, and of the comments of a source, that have more than
/// [`PARAGRAPH_LINES_MAX`] lines. An item of a list is a paragraph in a document and free in a comment.
#[must_use]
pub fn long_paragraphs(path: &str, text: &str) -> Vec<String> {
    let language = language(path);
    let found = match language {
        Language::Other => Vec::new(),
        Language::Markdown => paragraphs(language, text.lines().enumerate().map(|(i, l)| (i + 1, l))),
        _ => comments(language, text).into_iter().flat_map(|c| paragraphs(language, c)).collect(),
    };
    let long = found.into_iter().filter(|p| p.lines.len() > PARAGRAPH_LINES_MAX);
    long.filter(|p| language == Language::Markdown || !p.item)
        .map(|p| format!("{path}:{}: a paragraph of {} lines", p.line, p.lines.len()))
        .collect()
}

/// Returns the sentences of a document that have more than [`SENTENCE_WORDS_MAX`] words.
#[must_use]
pub fn long_sentences(path: &str, text: &str) -> Vec<String> {
    if language(path) != Language::Markdown {
        return Vec::new();
    }
    let mut out = Vec::new();
    for p in paragraphs(Language::Markdown, text.lines().enumerate().map(|(i, l)| (i + 1, l))) {
        for (line, words) in sentences(&p) {
            if words.len() > SENTENCE_WORDS_MAX {
                let start = words[..6].join(" ");
                out.push(format!("{path}:{line}: a sentence of {} words: {start} …", words.len()));
            }
        }
    }
    out
}

/// A run of lines of prose.
#[derive(Debug, Clone)]
struct Paragraph<'a> {
    line: usize,
    lines: Vec<&'a str>,
    /// An item of a list.
    item: bool,
}

/// Splits numbered lines of a document or a comment into paragraphs, without tables and fenced code.
fn paragraphs<'a>(
    language: Language,
    lines: impl IntoIterator<Item = (usize, &'a str)>,
) -> Vec<Paragraph<'a>> {
    let is_item = |content| is_item(content) || (language == Language::Python && is_field(content));
    let mut out: Vec<Paragraph<'a>> = Vec::new();
    let mut fenced = false;
    let mut open = false;
    for (line, written) in lines {
        let content = written.trim().trim_start_matches('>').trim();
        if content.starts_with("```") || content.starts_with("~~~") {
            fenced = !fenced;
            open = false;
        } else if fenced || content.is_empty() || is_table(content) || is_rule(content) {
            open = false;
        } else if content.starts_with('#') {
            out.push(Paragraph { line, lines: vec![content], item: false });
            open = false;
        } else if let Some(p) = out.last_mut().filter(|_| open && !is_item(content)) {
            p.lines.push(content);
        } else {
            out.push(Paragraph { line, lines: vec![content], item: is_item(content) });
            open = true;
        }
    }
    out
}

/// Splits a paragraph into sentences: the line of each, and its words. Code and the targets of links are
/// one word or none.
fn sentences(p: &Paragraph<'_>) -> Vec<(usize, Vec<String>)> {
    let mut out: Vec<(usize, Vec<String>)> = Vec::new();
    let mut ended = true;
    let mut in_code = false;
    for (i, line) in p.lines.iter().enumerate() {
        let (plain, still) = without_code(&without_links(line), in_code);
        in_code = still;
        for word in plain.split_whitespace() {
            let starts =
                word.chars().find(|c| c.is_alphanumeric() || *c == '§').is_some_and(|c| !c.is_lowercase());
            if ended && (out.is_empty() || starts) {
                out.push((p.line + i, Vec::new()));
            }
            if word.chars().any(char::is_alphanumeric) || word.contains('§') {
                out.last_mut().expect("begun").1.push(word.to_owned());
            }
            let bare = word.trim_end_matches([')', ']', '"', '\'', '*', '_', '”', '’']);
            ended = bare.ends_with(['.', '!', '?', '…'])
                && !ABBREVIATIONS.contains(&bare.to_lowercase().as_str());
        }
    }
    out
}

/// Replaces each code span by one sign. A span may go on in the next line.
fn without_code(line: &str, mut inside: bool) -> (String, bool) {
    let mut out = String::new();
    for (i, part) in line.split('`').enumerate() {
        if i > 0 {
            inside = !inside;
            if inside {
                out.push('§');
            }
        }
        if !inside {
            out.push_str(part);
        }
    }
    (out, inside)
}

/// Removes the targets of links and bare addresses.
fn without_links(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("](") {
        out.push_str(&rest[..=at]);
        rest = &rest[at + 2..];
        rest = rest.find(')').map_or("", |end| &rest[end + 1..]);
    }
    out.push_str(rest);
    let mut plain = String::new();
    let mut rest = out.as_str();
    while let Some(at) = ["https://", "http://"].iter().filter_map(|s| rest.find(s)).min() {
        plain.push_str(&rest[..at]);
        rest = &rest[at..];
        rest = &rest
            [rest.find(|c: char| c.is_whitespace() || matches!(c, ')' | '>' | '"')).unwrap_or(rest.len())..];
    }
    plain.push_str(rest);
    plain
}

fn is_table(content: &str) -> bool {
    content.starts_with('|')
}

fn is_rule(content: &str) -> bool {
    content.len() >= 3 && content.chars().all(|c| matches!(c, '-' | '=' | '*' | '_'))
}

/// Whether a line begins an item of a list: a bullet, a number, or an invariant's name (`I1`).
fn is_item(content: &str) -> bool {
    if ["- ", "* ", "+ ", "• "].iter().any(|b| content.starts_with(b)) {
        return true;
    }
    let content = content.trim_start_matches(['*', '`']);
    let number = content.strip_prefix('I').unwrap_or(content);
    let rest = number.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = rest.len() < number.len();
    let invariant =
        number.len() < content.len() && rest.starts_with([' ', '.', ':', ',', '`', '*', '–', '-']);
    numbered && (invariant || rest.starts_with(". ") || rest.starts_with(") "))
}

/// Whether a line of a docstring begins a section (`Args:`) or one of its entries (`name, other: text`).
fn is_field(content: &str) -> bool {
    let Some((names, rest)) = content.split_once(':') else { return false };
    let name =
        |n: &str| !n.is_empty() && n.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '*' | '`'));
    names.split(", ").all(name) && (rest.is_empty() || rest.starts_with(' '))
}

/// Returns the text of a line that is a comment and nothing else.
fn comment_text(language: Language, line: &str) -> Option<&str> {
    let line = line.trim();
    match language {
        Language::Rust => ["///", "//!", "//"].iter().find_map(|m| line.strip_prefix(m)),
        Language::Python | Language::Script => line.strip_prefix('#').filter(|l| !l.starts_with('!')),
        Language::Markdown | Language::Other => None,
    }
}

/// Returns the blocks of comment lines of a source, numbered. A docstring of Python is a block.
fn comments(language: Language, text: &str) -> Vec<Vec<(usize, &str)>> {
    let mut out: Vec<Vec<(usize, &str)>> = Vec::new();
    let mut block: Vec<(usize, &str)> = Vec::new();
    let mut kind = "";
    // Inside a string of several lines: whether it is a docstring.
    let mut string: Option<bool> = None;
    for (i, written) in text.lines().enumerate() {
        let line = written.trim();
        let quotes = if language == Language::Python { line.matches("\"\"\"").count() } else { 0 };
        let begins = line.trim_start_matches('r').starts_with("\"\"\"");
        if string.is_some() || quotes > 0 {
            if string.unwrap_or(begins) {
                if string.is_none() {
                    out.push(std::mem::take(&mut block));
                }
                block.push((i + 1, line.trim_start_matches("r\"").trim_matches('"')));
            }
            if quotes % 2 == 1 {
                string = if string.is_none() { Some(begins) } else { None };
            }
            if string.is_none() {
                out.push(std::mem::take(&mut block));
            }
            continue;
        }
        let now = ["///", "//!", "//"].into_iter().find(|m| line.starts_with(m)).unwrap_or("#");
        match comment_text(language, line) {
            Some(content) => {
                if now != kind {
                    out.push(std::mem::take(&mut block));
                }
                kind = now;
                block.push((i + 1, content));
            }
            None => out.push(std::mem::take(&mut block)),
        }
    }
    out.push(block);
    out.retain(|b| !b.is_empty());
    out
}
