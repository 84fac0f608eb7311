//! The files of an earlier version, in path order, as something a run already knows.

use super::content::Content;
use super::known::{Earlier, Known, trusted};
use crate::failure::Failure;
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

/// Reads a version part by part; two parts in memory at most.
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

impl Earlier for ParentRows {
    fn next(&mut self) -> Result<Option<(String, Known)>, Failure> {
        let at_ns = self.version.layout_doc().indexed_at_ns;
        loop {
            let Some(open) = &mut self.open else {
                if self.load()? {
                    continue;
                }
                return Ok(None);
            };
            let row = open.row;
            if row >= open.part.entries.len() {
                self.open = None;
                continue;
            }
            open.row += 1;
            let entry = open.part.entries.get(row);
            let Some(chunk) = open.chunks.get(open.pins[row] as usize) else { continue };
            let (EntryKind::File, Some(hash)) = (entry.kind, entry.hash) else { continue };
            if chunk.pin.size != entry.size || !trusted(&chunk.pin, at_ns, self.local) {
                continue;
            }
            let content = Content { hash, slices: open.part.placed.slices(row).to_vec() };
            return Ok(Some((entry.path.to_owned(), Known { pin: chunk.pin.clone(), content })));
        }
    }
}
