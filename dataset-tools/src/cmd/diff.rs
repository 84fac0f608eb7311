//! `fletch diff`: merges two versions in path order. Skips parts with the same hash, so it reads only parts
//! that differ.

use super::{Context, streamed};
use crate::failure::Failure;
use crate::out::Rows;
use crate::target::Target;
use fletch_core::manifest::{Entry, EntryKind};
use fletch_tables::{LoadedPart, TableError, Version};
use serde::Serialize;
use std::cmp::Ordering;
use std::io;
use std::sync::Arc;

#[derive(Serialize)]
struct Head {
    a: String,
    b: String,
}

#[derive(Serialize)]
struct Side {
    kind: &'static str,
    size: u64,
    blake3: Option<String>,
    target: Option<String>,
}

#[derive(Serialize)]
struct Change {
    change: &'static str,
    path: String,
    what: Vec<&'static str>,
    a: Option<Side>,
    b: Option<Side>,
}

#[derive(Default, Serialize)]
struct Summary {
    added: u64,
    removed: u64,
    changed: u64,
}

fn side(e: &Entry) -> Side {
    Side {
        kind: e.kind.as_str(),
        size: e.size,
        blake3: e.hash.map(|h| h.to_string()),
        target: (e.kind == EntryKind::Symlink).then(|| e.target.clone()),
    }
}

/// A position in a version: a part and a row in it.
struct Cursor<'a> {
    version: &'a Version,
    part: usize,
    row: usize,
    loaded: Option<Arc<LoadedPart>>,
}

impl<'a> Cursor<'a> {
    fn new(version: &'a Version) -> Self {
        Cursor { version, part: 0, row: 0, loaded: None }
    }

    /// Returns the hash of the part that begins at the cursor.
    fn part_hash(&self) -> Option<fletch_core::Hash> {
        (self.row == 0).then(|| self.version.index().parts().get(self.part).map(|p| p.hash))?
    }

    fn skip_part(&mut self) {
        self.part += 1;
        self.loaded = None;
    }

    async fn peek(&mut self) -> Result<Option<Entry>, TableError> {
        if self.part >= self.version.index().parts().len() {
            return Ok(None);
        }
        let part = match &self.loaded {
            Some(part) => part,
            None => self.loaded.insert(self.version.part(self.part).await?),
        };
        Ok(Some(part.entry(self.row).to_owned()))
    }

    fn advance(&mut self) {
        self.row += 1;
        if self.loaded.as_ref().is_none_or(|p| self.row >= p.len()) {
            self.row = 0;
            self.skip_part();
        }
    }
}

/// Returns the next change; `None` at the end.
async fn next(a: &mut Cursor<'_>, b: &mut Cursor<'_>) -> Result<Option<Change>, TableError> {
    loop {
        if let (Some(x), Some(y)) = (a.part_hash(), b.part_hash())
            && x == y
        {
            a.skip_part();
            b.skip_part();
            continue;
        }
        let (x, y) = (a.peek().await?, b.peek().await?);
        let order = match (&x, &y) {
            (None, None) => return Ok(None),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(x), Some(y)) => x.path.cmp(&y.path),
        };
        if order != Ordering::Greater {
            a.advance();
        }
        if order != Ordering::Less {
            b.advance();
        }
        let (x, y) = match order {
            Ordering::Less => (x, None),
            Ordering::Greater => (None, y),
            Ordering::Equal => (x, y),
        };
        let mut what = Vec::new();
        let change = match (&x, &y) {
            (Some(x), Some(y)) => {
                let parts = [
                    ("kind", x.kind != y.kind),
                    ("size", x.size != y.size),
                    ("content", x.hash != y.hash),
                    ("target", x.target != y.target),
                    ("sample", x.sample != y.sample),
                ];
                what.extend(parts.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name));
                if what.is_empty() {
                    continue;
                }
                "changed"
            }
            (Some(_), None) => "removed",
            (None, _) => "added",
        };
        let path = x.as_ref().or(y.as_ref()).map_or_else(String::new, |e| e.path.clone());
        return Ok(Some(Change { change, path, what, a: x.as_ref().map(side), b: y.as_ref().map(side) }));
    }
}

pub fn run(ctx: &Context, a: &Target, b: &Target) -> Result<(), Failure> {
    let (a, b) = (ctx.open(a)?.version, ctx.open(b)?.version);
    let head = Head { a: a.root().to_string(), b: b.root().to_string() };
    let (mut at_a, mut at_b) = (Cursor::new(&a), Cursor::new(&b));
    let mut failed = None;
    streamed(|w| {
        let mut summary = Summary::default();
        let mut rows = Rows::begin(w, ctx.out.json, &head, "changes")?;
        loop {
            let change = match ctx.rt.block_on(next(&mut at_a, &mut at_b)) {
                Ok(Some(change)) => change,
                Ok(None) => break,
                Err(e) => {
                    failed = Some(Failure::from(e));
                    break;
                }
            };
            let sign = match change.change {
                "added" => {
                    summary.added += 1;
                    '+'
                }
                "removed" => {
                    summary.removed += 1;
                    '-'
                }
                _ => {
                    summary.changed += 1;
                    '~'
                }
            };
            rows.push(&change, |change, w| text(w, sign, change))?;
        }
        ctx.out.note(format_args!(
            "{} added, {} removed, {} changed",
            summary.added, summary.removed, summary.changed
        ));
        rows.end("summary", &summary)
    })?;
    failed.map_or(Ok(()), Err)
}

fn text(w: &mut dyn io::Write, sign: char, change: &Change) -> io::Result<()> {
    // The text shows a member below its shard; --json has the path with its NUL.
    write!(w, "{sign} {}", change.path.replace('\0', "/"))?;
    if change.what.is_empty() { writeln!(w) } else { writeln!(w, " ({})", change.what.join(", ")) }
}
