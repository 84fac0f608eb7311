//! Where output goes: results to stdout, everything else to stderr.

use crate::failure::Failure;
use serde::Serialize;
use std::io::{self, Write};

/// How a command talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Out {
    /// Results as JSON.
    pub json: bool,
    /// No notes and no progress.
    pub quiet: bool,
}

impl Out {
    /// A result: `value` with `--json`, else what `text` writes.
    ///
    /// # Errors
    /// When stdout is gone.
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
        written.and_then(|()| out.flush()).map_err(|e| broken(&e))
    }

    /// Tells, once for a run, of archives whose members stay unseen.
    pub fn tell_compressed(&self, archives: u64) {
        if archives > 0 {
            self.note(format_args!(
                "{archives} compressed archives are files like any other: members can be read by range only from a plain .tar; decompress them to have what is in them"
            ));
        }
    }

    /// A line for people, on stderr.
    pub fn note(&self, line: impl std::fmt::Display) {
        if !self.quiet {
            eprintln!("{line}");
        }
    }

    /// A line for people that `--quiet` does not silence.
    pub fn warn(&self, line: impl std::fmt::Display) {
        eprintln!("warning: {line}");
    }
}

/// Writing a result failed.
#[must_use]
pub fn broken(e: &io::Error) -> Failure {
    Failure::io("cannot write to stdout", e)
}

/// A list too long to hold, written item by item: as lines, or with `--json` as
/// `{ <fields of the head>, "<name>": [ … ], "<last>": … }`.
pub struct Rows<'a> {
    out: &'a mut dyn Write,
    json: bool,
    first: bool,
}

impl<'a> Rows<'a> {
    /// Begins with the fields of `head` (an object) and the list `name`.
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

    /// Adds an item; `text` writes its line.
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

    /// Ends the list, adds a last field, and ends the document.
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

/// Bytes for people.
#[must_use]
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}
