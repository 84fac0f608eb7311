//! The output of a command: results go to stdout, everything else to stderr.

use crate::failure::Failure;
use serde::Serialize;
use std::io::{self, Write};

/// The output of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Out {
    /// Whether results are printed as JSON.
    pub json: bool,
    /// Whether notes and progress are left out.
    pub quiet: bool,
    /// Where notes and warnings go.
    pub notes: Notes,
}

/// Where the notes and warnings of a run go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notes {
    /// To stderr, for who gave the command.
    Stderr,
    /// To the log of a server.
    Log,
}

impl Out {
    /// Prints a result: `value` with `--json`, otherwise what `text` writes.
    ///
    /// # Errors
    /// [`Failure`] when stdout cannot be written.
    pub fn result(
        &self,
        value: &impl Serialize,
        text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let mut out = io::BufWriter::new(io::stdout().lock());
        let written = if self.json {
            serde_json::to_writer_pretty(&mut out, value)
                .map_err(io::Error::from)
                .and_then(|()| writeln!(out))
        } else {
            text(&mut out)
        };
        written.and_then(|()| out.flush()).map_err(|e| stdout_failed(&e))
    }

    /// Notes, once for a run, how many compressed archives are treated as plain files.
    pub fn note_compressed(&self, archives: u64) {
        if archives > 0 {
            self.note(format_args!(
                "without members, because only members of an uncompressed .tar can be read by range: {}; \
                 decompress them to get their members",
                count(archives, "compressed archive")
            ));
        }
    }

    /// Says a note, unless the output is quiet.
    pub fn note(&self, line: impl std::fmt::Display) {
        match self.notes {
            Notes::Log => tracing::info!("{line}"),
            Notes::Stderr if self.quiet => {}
            Notes::Stderr => eprintln!("{line}"),
        }
    }

    /// Says a warning, also with `--quiet`.
    pub fn warn(&self, line: impl std::fmt::Display) {
        match self.notes {
            Notes::Log => tracing::warn!("{line}"),
            Notes::Stderr => eprintln!("warning: {line}"),
        }
    }
}

/// Returns the failure of a write to stdout.
#[must_use]
pub fn stdout_failed(e: &io::Error) -> Failure {
    Failure::io("cannot write to stdout", e)
}

/// Prints a long list item by item: as lines, or with `--json` as one document.
///
/// The document is `{ <fields of the head>, "<name>": [ … ], "<last>": … }`.
pub struct Rows<'a> {
    out: &'a mut dyn Write,
    json: bool,
    first: bool,
}

impl<'a> Rows<'a> {
    /// Begins the document with the fields of `head`, an object, and the list `name`.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn begin(out: &'a mut dyn Write, json: bool, head: &impl Serialize, name: &str) -> io::Result<Self> {
        if json {
            let head = serde_json::to_string(head)?;
            let head = head.strip_suffix('}').unwrap_or(&head);
            let comma = if head == "{" { "" } else { "," };
            write!(out, "{head}{comma}{}:[", serde_json::to_string(name)?)?;
        }
        Ok(Rows { out, json, first: true })
    }

    /// Prints an item. Without `--json`, `text` writes its line.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn push<T: Serialize>(
        &mut self,
        item: &T,
        text: impl FnOnce(&T, &mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        if !self.json {
            return text(item, self.out);
        }
        self.out.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        serde_json::to_writer(&mut self.out, item)?;
        Ok(())
    }

    /// Ends the list and the document, with one field after the list.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn end(self, name: &str, last: &impl Serialize) -> io::Result<()> {
        if self.json {
            writeln!(self.out, "\n],{}:{}}}", serde_json::to_string(name)?, serde_json::to_string(last)?)?;
        }
        self.out.flush()
    }
}

/// Formats a number with its noun, in the plural unless the number is 1: "1 fault", "2 entries".
#[must_use]
pub fn count(n: impl TryInto<u64>, noun: &str) -> String {
    let n: u64 = n.try_into().unwrap_or(u64::MAX);
    match noun.strip_suffix('y') {
        _ if n == 1 => format!("1 {noun}"),
        Some(begin) => format!("{n} {begin}ies"),
        None => format!("{n} {noun}s"),
    }
}

/// Formats a number of bytes with a binary unit.
#[must_use]
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_no_plural() {
        let said: Vec<String> = [0, 1, 2].map(|n| count(n, "fault")).into();
        assert_eq!(said, ["0 faults", "1 fault", "2 faults"]);
        assert_eq!((count(1, "entry"), count(7, "entry")), ("1 entry".into(), "7 entries".into()));
        assert_eq!(count(12_usize, "empty file"), "12 empty files");
    }
}
