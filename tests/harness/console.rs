//! Executes the `console` blocks of a Markdown document, and compares the output with the document.
//!
//! A block begins with ```` ```console ````. A command follows `$ ` (a trailing `\` continues it). The lines
//! below a command are its output, stdout and stderr together. `…` in a line stands for any text; a line that
//! is only `…` stands for any number of lines. The commands of a document share one shell, so `cd` and
//! variables persist.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// A command and its expected output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The line in the document, from 1.
    pub line: usize,
    /// The command, with its continuation lines.
    pub command: String,
    /// The expected lines of output.
    pub expected: Vec<String>,
}

/// Returns the steps of all blocks with this info string, in order.
#[must_use]
pub fn steps(markdown: &str, info: &str) -> Vec<Step> {
    let mut out: Vec<Step> = Vec::new();
    let mut inside = false;
    let mut continued = false;
    for (i, line) in markdown.lines().enumerate() {
        if let Some(fence) = line.trim_start().strip_prefix("```") {
            inside = !inside && fence.trim() == info;
            continued = false;
            continue;
        }
        if !inside {
            continue;
        }
        if let Some(c) = line.strip_prefix("$ ") {
            out.push(Step { line: i + 1, command: c.to_owned(), expected: Vec::new() });
            continued = c.ends_with('\\');
        } else if let Some(step) = out.last_mut() {
            if continued {
                step.command.push('\n');
                step.command.push_str(line);
                continued = line.ends_with('\\');
            } else {
                step.expected.push(line.to_owned());
            }
        }
    }
    out
}

/// Returns the bodies of all fenced blocks with this info string, with the number of each one's first line.
#[must_use]
pub fn blocks(markdown: &str, info: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    let mut open: Option<(usize, String)> = None;
    let mut other = false;
    for (i, line) in markdown.lines().enumerate() {
        if let Some(fence) = line.trim_start().strip_prefix("```") {
            if let Some(b) = open.take() {
                out.push(b);
            } else if other {
                other = false;
            } else if fence.trim() == info {
                open = Some((i + 2, String::new()));
            } else {
                other = true;
            }
        } else if let Some((_, body)) = &mut open {
            body.push_str(line);
            body.push('\n');
        }
    }
    out
}

/// Whether the printed lines match the expected ones.
#[must_use]
pub fn matches(expected: &[String], printed: &[&str]) -> bool {
    match expected.split_first() {
        None => printed.is_empty(),
        Some((e, rest)) if e.trim() == "…" => (0..=printed.len()).any(|n| matches(rest, &printed[n..])),
        Some((e, rest)) => printed
            .split_first()
            .is_some_and(|(p, more)| line_matches(e.trim_end(), p.trim_end()) && matches(rest, more)),
    }
}

fn line_matches(expected: &str, printed: &str) -> bool {
    let mut pieces = expected.split('…');
    let Some(mut left) = pieces.next().and_then(|first| printed.strip_prefix(first)) else { return false };
    let mut pieces: Vec<&str> = pieces.collect();
    let Some(last) = pieces.pop() else { return left.is_empty() };
    for p in pieces {
        match left.find(p) {
            Some(at) => left = &left[at + p.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

/// Runs all steps in one shell, and reports every difference.
///
/// # Errors
/// The line, the command, and the expected and printed lines of each step that differs.
pub fn run(steps: &[Step], dir: &Path, env: &[(&str, &str)]) -> Result<(), String> {
    const MARK: &str = "\u{1}step";
    let mut script = String::from("exec 2>&1 </dev/null\n");
    for (i, s) in steps.iter().enumerate() {
        script.push_str(&format!(
            "printf '{MARK} {i}\\n'\n{}\nprintf '\\n{MARK} {i} exit %s\\n' $?\n",
            s.command
        ));
    }
    // The output goes to a file, and the shell has its own process group. So a daemon that the document did
    // not end can neither block this function nor outlive it.
    let log = tempfile::NamedTempFile::new().map_err(|e| format!("log: {e}"))?;
    let out = log.reopen().map_err(|e| format!("log: {e}"))?;
    let mut shell = Command::new("bash")
        .arg("-c")
        .arg(&script)
        .current_dir(dir)
        .envs(env.iter().copied())
        .stdout(out)
        .process_group(0)
        .spawn()
        .map_err(|e| format!("bash: {e}"))?;
    let group = i32::try_from(shell.id()).map(nix::unistd::Pid::from_raw).map_err(|e| format!("pid: {e}"))?;
    shell.wait().map_err(|e| format!("bash: {e}"))?;
    // A daemon may take a moment to end.
    let end = Instant::now() + Duration::from_secs(12);
    let alive = || nix::sys::signal::killpg(group, None).is_ok();
    while alive() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let left = alive() && nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGTERM).is_ok();
    let text = std::fs::read(log.path()).map_err(|e| format!("log: {e}"))?;
    let text = String::from_utf8_lossy(&text);
    let mut faults = String::new();
    for (i, s) in steps.iter().enumerate() {
        let body = text
            .split_once(&format!("{MARK} {i}\n"))
            .and_then(|(_, rest)| rest.split_once(&format!("\n{MARK} {i} exit ")));
        let Some((body, rest)) = body else {
            faults.push_str(&format!(
                "line {}: `{}` did not finish; the shell printed\n{text}\n",
                s.line, s.command
            ));
            break;
        };
        let exit = rest.lines().next().unwrap_or("?");
        let printed: Vec<&str> = body.lines().collect();
        if exit != "0" || !matches(&s.expected, &printed) {
            faults.push_str(&format!(
                "line {}: `{}` (exit {exit})\n  expected:\n    {}\n  printed:\n    {}\n",
                s.line,
                s.command,
                s.expected.join("\n    "),
                printed.join("\n    ")
            ));
        }
    }
    if left {
        faults.push_str("the document leaves a process running\n");
    }
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_line_fails() {
        let doc = "x\n```console\n$ echo one \\\n  two\none two\n$ printf 'a\\nb\\nc\\n'\na\n…\n\
                   $ false || echo rescued\nres…d\n```\n```sh\n$ no\n```\n";
        let s = steps(doc, "console");
        assert_eq!(s.len(), 3);
        assert_eq!(run(&s, Path::new("/"), &[]), Ok(()));
        for (from, to) in [
            ("one two\n$", "one too\n$"),
            ("\na\n", "\nb\n"),
            ("res…d", "rex…d"),
            ("$ false ||", "$ false &&"),
        ] {
            let changed = doc.replace(from, to);
            assert_ne!(changed, doc);
            assert!(run(&steps(&changed, "console"), Path::new("/"), &[]).is_err(), "{to}");
        }
        assert_eq!(blocks(doc, "sh"), [(13, "$ no\n".to_owned())]);
    }
}
