//! The commands that a document shows: those of its blocks, and those in code spans of its text.
//!
//! A block `sh` shows commands, a block `console` commands with their output, a block `python` a program.
//! Blocks with another info string show none.

use crate::bins::{bin, bin_dir, repo, without_variables};
use crate::console;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The programs whose calls count as commands.
const PROGRAMS: &[&str] = &[
    "apt",
    "aws",
    "chmod",
    "curl",
    "df",
    "dmesg",
    "docker",
    "etcd",
    "etcdctl",
    "fletch",
    "fletch-mount",
    "fletch-server",
    "helm",
    "journalctl",
    "kill",
    "kubectl",
    "mount",
    "openssl",
    "podman",
    "promtool",
    "rm",
    "systemctl",
    "umount",
];

/// A command of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The line in the document, from 1.
    pub line: usize,
    /// The command, without line breaks if it is one line of a shell.
    pub text: String,
    /// The output that the document shows, for a block `console`.
    pub expected: Option<Vec<String>>,
    /// The info string of the block. `None`: a code span.
    pub block: Option<String>,
}

impl Shown {
    /// Whether it only names a command of Fletch, with neither arguments nor flags.
    #[must_use]
    pub fn is_name(&self) -> bool {
        let is_word = |w: &str| w.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !w.starts_with('-');
        self.block.is_none() && self.text.starts_with("fletch") && self.text.split(' ').all(is_word)
    }
}

fn begins_with_a_program(text: &str) -> bool {
    text.split(' ').next().is_some_and(|first| PROGRAMS.contains(&first))
}

/// Returns the lines of a block, with continued lines joined. A loop is one line.
fn shell_lines(first: usize, block: &str) -> Vec<(usize, String)> {
    if block.contains("\ndone") {
        return vec![(first, block.to_owned())];
    }
    let mut out: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (i, line) in block.lines().enumerate() {
        let (text, continued) = match line.strip_suffix('\\') {
            Some(text) => (text.trim(), true),
            None => (line.trim(), false),
        };
        match out.last_mut() {
            Some((_, last)) if is_open => {
                last.push(' ');
                last.push_str(text);
            }
            _ if text.is_empty() => {}
            _ => out.push((first + i, text.to_owned())),
        }
        is_open = continued;
    }
    out
}

/// Returns the code spans outside of blocks, with their lines.
fn spans(markdown: &str) -> Vec<(usize, String)> {
    let mut text = String::new();
    let mut inside = false;
    for line in markdown.lines() {
        let is_fence = line.trim_start().starts_with("```");
        inside ^= is_fence;
        text.push_str(if inside || is_fence { "" } else { line });
        text.push('\n');
    }
    let (mut out, mut line) = (Vec::new(), 1);
    for (i, part) in text.split('`').enumerate() {
        if i % 2 == 1 {
            out.push((line, part.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
        line += part.matches('\n').count();
    }
    out
}

/// Returns the commands of a document, in its order within each kind of block.
#[must_use]
pub fn commands(markdown: &str) -> Vec<Shown> {
    let mut out = Vec::new();
    for step in console::steps(markdown, "console") {
        let (line, text) = (step.line, step.command);
        out.push(Shown { line, text, expected: Some(step.expected), block: Some("console".to_owned()) });
    }
    for (first, block) in console::blocks(markdown, "sh") {
        let lines = shell_lines(first, &block).into_iter();
        out.extend(lines.map(|(line, text)| Shown {
            line,
            text,
            expected: None,
            block: Some("sh".to_owned()),
        }));
    }
    for info in ["python", "sh diagnose", "sh remedy"] {
        let whole = console::blocks(markdown, info).into_iter();
        out.extend(whole.map(|(line, text)| Shown {
            line,
            text: text.trim_end().to_owned(),
            expected: None,
            block: Some(info.to_owned()),
        }));
    }
    let called = spans(markdown).into_iter().filter(|(_, s)| begins_with_a_program(s) && s.contains(' '));
    out.extend(called.map(|(line, text)| Shown { line, text, expected: None, block: None }));
    out
}

/// Returns the lines of `text` blocks that are commands, which nobody would execute.
#[must_use]
pub fn hidden_commands(markdown: &str) -> Vec<String> {
    let blocks = ["", "text"].iter().flat_map(|info| console::blocks(markdown, info));
    let lines = blocks.flat_map(|(first, block)| shell_lines(first, &block));
    let is_command = |text: &str| begins_with_a_program(text.trim_start_matches("$ "));
    lines.filter(|(_, text)| is_command(text)).map(|(line, text)| format!("line {line}: {text}")).collect()
}

/// Splits a shell's text into words. A separator of commands is a word of its own.
fn words(text: &str) -> Vec<String> {
    let (mut out, mut word, mut quote) = (Vec::new(), String::new(), None);
    let mut is_quoted = false;
    let end = |word: &mut String, is_quoted: &mut bool, out: &mut Vec<String>| {
        if !word.is_empty() || *is_quoted {
            out.push(std::mem::take(word));
        }
        *is_quoted = false;
    };
    for c in text.chars() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            (c, Some(_)) => word.push(c),
            ('"' | '\'', None) => (quote, is_quoted) = (Some(c), true),
            ('#', None) if word.is_empty() => break,
            ('|' | '&' | ';' | '(' | ')' | '\n' | '>' | '<', None) => {
                // The number of a file that is redirected.
                if c == '>' && word.chars().all(|c| c.is_ascii_digit()) {
                    word.clear();
                }
                end(&mut word, &mut is_quoted, &mut out);
                out.push(if matches!(c, '>' | '<') { "<>".to_owned() } else { ";".to_owned() });
            }
            (c, None) if c.is_whitespace() => end(&mut word, &mut is_quoted, &mut out),
            (c, None) => word.push(c),
        }
    }
    end(&mut word, &mut is_quoted, &mut out);
    out
}

/// Returns the calls of programs of Fletch in a command, each with its words, also those that another
/// program such as `kubectl exec` runs.
#[must_use]
pub fn calls(command: &str) -> Vec<Vec<String>> {
    let is_program = |w: &String| matches!(&**w, "fletch" | "fletch-server" | "fletch-mount");
    let command = command.replace("\\\n", " ");
    let words = words(&command);
    let mut out = Vec::new();
    for call in words.split(|w| w == ";") {
        let redirected = call.iter().position(|w| w == "<>").unwrap_or(call.len());
        let call = &call[..redirected];
        let is_prefix = |w: &&String| {
            w.contains('=') && !w.starts_with('-')
                || matches!(&***w, "do" | "then" | "if" | "!" | "exec" | "sudo" | "time" | "else")
        };
        let skipped = call.iter().take_while(is_prefix).count();
        let run_by_another = call.windows(2).position(|w| w[0] == "--" && is_program(&w[1]));
        let start = match run_by_another {
            Some(at) => at + 1,
            None => skipped,
        };
        if call.get(start).is_some_and(is_program) {
            out.push(call[start..].to_vec());
        }
    }
    out
}

/// Has the program's own parser read a call, without running it. Returns what the parser says against it.
/// Upper-case words stand for values, as do variables. A flag may be named without its value.
///
/// # Panics
/// If the program cannot be run.
#[must_use]
pub fn refused(call: &[String]) -> Option<String> {
    let value = |word: &String| {
        let mut word = word.replace("[@TAG]", "").replace('…', "x").replace(['[', ']'], "");
        for (name, value) in [
            ("URL", "http://127.0.0.1:7380"),
            ("$FLETCH_SERVER", "http://127.0.0.1:7380"),
            ("SIZE", "1GiB"),
            ("ADDR", "127.0.0.1:9400"),
        ] {
            if word == name || word == format!("${name}") {
                value.clone_into(&mut word);
            }
        }
        match word.strip_prefix('$') {
            Some(_) => "x".to_owned(),
            None if word == "R" || word == "N" => "1".to_owned(),
            None => word,
        }
    };
    let mut c = without_variables(Command::new(bin(&call[0])));
    c.args(call[1..].iter().map(value)).arg("--help").stdin(Stdio::null());
    let out = c.output().unwrap_or_else(|e| panic!("{}: {e}", call[0]));
    let said = String::from_utf8_lossy(&out.stderr).lines().next().unwrap_or_default().to_owned();
    let is_refused = !out.status.success() && !said.contains("a value is required for");
    is_refused.then(|| format!("{}: {said}", call.join(" ")))
}

/// Runs a command as a reader of the document does: in a shell, in a directory of the reader's own. Returns
/// the exit code, and what was printed to stdout and stderr together.
///
/// # Panics
/// If there is no bash.
#[must_use]
pub fn run_as_reader(command: &str, dir: &Path, variables: &[(&str, &str)]) -> (i32, String) {
    let mut c = without_variables(Command::new("bash"));
    let path = format!("{}:{}", bin_dir().display(), std::env::var("PATH").unwrap_or_default());
    c.args(["-c", &format!("exec 2>&1\n{command}")]).current_dir(dir).env("PATH", path);
    c.env("HOME", dir).env("FLETCH_STATE_DIR", dir.join("reader-state")).envs(variables.iter().copied());
    let out = c.stdin(Stdio::null()).output().expect("bash");
    (out.status.code().unwrap_or(-1), String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Whether what was printed is what a document shows. Numbers and hashes differ from run to run, and so does
/// the width of columns.
#[must_use]
pub fn agrees(expected: &[String], printed: &str) -> bool {
    let number = |word: &str| {
        let bare = word.trim_matches(['(', ')', ';', ',']);
        let digits = bare.trim_start_matches(['+', '-']);
        let is_number = digits.contains(|c: char| c.is_ascii_digit())
            && digits.chars().all(|c| c.is_ascii_hexdigit() || matches!(c, '.' | '…'));
        if is_number { word.replace(bare, "0") } else { word.to_owned() }
    };
    let line = |l: &str| l.split_whitespace().map(number).collect::<Vec<_>>().join(" ");
    let expected: Vec<String> = expected.iter().map(|l| line(l)).collect();
    let printed: Vec<String> = printed.lines().map(line).collect();
    console::matches(&expected, &printed.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Whether there is a test of this name, `file::function`, below `tests/integration`.
#[must_use]
pub fn is_a_test(name: &str) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    let (files, function) = match parts[..] {
        [binary, function] => (vec![format!("{binary}.rs"), format!("{binary}/main.rs")], function),
        [binary, module, function] => (vec![format!("{binary}/{module}.rs")], function),
        _ => return false,
    };
    let read = |file| fs::read_to_string(repo().join("tests/integration").join(file)).ok();
    let Some(text) = files.into_iter().find_map(read) else { return false };
    let Some((before, _)) = text.split_once(&format!("fn {function}(")) else { return false };
    let attribute = before.rfind("\n\n").map_or("", |at| &before[at..]);
    attribute.contains("#[test]") || attribute.contains("#[tokio::test")
}
