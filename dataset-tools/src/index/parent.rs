//! The files of an earlier version, in path order, as something a run already knows.

use super::content::Content;
use super::known::{Earlier, Known, trusted};
use crate::failure::Failure;
use fletch_core::manifest::tar::shard::{ShardMember, is_shard};
use fletch_core::manifest::{EntryKind, LayoutParams};
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, Version};
use std::sync::Arc;
use tokio::runtime::Handle;

/// One part, with the row of `chunks.parquet` that has each entry's pin.
struct Open {
    part: Arc<LoadedPart>,
    chunks: Arc<Vec<ChunkRow>>,
    /// By row of the part; `u32::MAX` for none.
    pins: Vec<u32>,
    row: usize,
}

/// Reads a version part by part; two parts, and the members of one shard, in memory at most.
pub struct ParentRows {
    rt: Handle,
    version: Version,
    next_part: usize,
    open: Option<Open>,
    local: bool,
}

impl ParentRows {
    /// Begins at the first entry of `version`.
    ///
    /// # Errors
    /// When its layout was made with other parameters.
    pub fn new(rt: Handle, version: Version, local: bool) -> Result<Self, Failure> {
        if version.layout_doc().params != LayoutParams::INDEX {
            return Err(Failure::new(format!(
                "the parent's layout {} is not one that `index` makes",
                version.layout()
            ))
            .hint("give a parent that was indexed, or leave --parent out"));
        }
        Ok(ParentRows { rt, version, next_part: 0, open: None, local })
    }

    fn load(&mut self) -> Result<bool, Failure> {
        let i = self.next_part;
        if i >= self.version.index().parts().len() {
            return Ok(false);
        }
        self.next_part += 1;
        let both =
            async { Ok::<_, Failure>((self.version.part(i).await?, self.version.chunk_rows(i).await?)) };
        let (part, chunks) = self.rt.block_on(both)?;
        let mut pins = vec![u32::MAX; part.entries.len()];
        for (at, chunk) in chunks.iter().enumerate() {
            if let ObjectRef::Entry { row } = chunk.object
                && let Some(slot) = pins.get_mut(row as usize)
                && *slot == u32::MAX
            {
                *slot = u32::try_from(at).unwrap_or(u32::MAX);
            }
        }
        self.open = Some(Open { part, chunks, pins, row: 0 });
        Ok(true)
    }
}

impl ParentRows {
    /// The part at hand, with rows left in it.
    fn at_row(&mut self) -> Result<Option<&mut Open>, Failure> {
        while self.open.as_ref().is_none_or(|open| open.row >= open.part.entries.len()) {
            if !self.load()? {
                self.open = None;
                return Ok(None);
            }
        }
        Ok(self.open.as_mut())
    }

    /// The members of the shard whose row was the last one.
    fn members(&mut self, shard: &str) -> Result<Vec<ShardMember>, Failure> {
        let mut members = Vec::new();
        while let Some(open) = self.at_row()? {
            let entry = open.part.entries.get(open.row);
            let name = entry.path.strip_prefix(shard).and_then(|rest| rest.strip_prefix('\0'));
            let (Some(name), Some(hash)) = (name, entry.hash) else { break };
            let slices = open.part.placed.slices(open.row).to_vec();
            members.push(ShardMember { name: name.to_owned(), size: entry.size, hash, slices });
            open.row += 1;
        }
        Ok(members)
    }
}

impl Earlier for ParentRows {
    fn next(&mut self) -> Result<Option<(String, Known)>, Failure> {
        let (at_ns, local) = (self.version.layout_doc().indexed_at_ns, self.local);
        loop {
            let Some(open) = self.at_row()? else { return Ok(None) };
            let row = open.row;
            open.row += 1;
            let entry = open.part.entries.get(row);
            let Some(chunk) = open.chunks.get(open.pins[row] as usize) else { continue };
            let (EntryKind::File, Some(hash)) = (entry.kind, entry.hash) else { continue };
            if chunk.pin.size != entry.size || !trusted(&chunk.pin, at_ns, local) {
                continue;
            }
            let (path, pin) = (entry.path.to_owned(), chunk.pin.clone());
            let slices = open.part.placed.slices(row).to_vec();
            let members = if is_shard(&path) { self.members(&path)? } else { Vec::new() };
            return Ok(Some((path, Known { pin, content: Content { hash, slices, members } })));
        }
    }
}
