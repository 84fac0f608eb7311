//! Where bytes of a version lie: a chunk that was located, and the objects that hold its bytes.

use super::{
    HomeOrigin, Sources, VersionError,
    race::Candidate,
    renewed_pins::object_key,
    source::{ObjectLocation, PartRow, Source},
};
use crate::tenancy::{state::RegistrationHandle, tenants::ColdChunk};
use bytes::{Bytes, BytesMut};
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{Root, StoreKey, groups::GroupHashes, manifest::ObjectState};
use fletch_origin::{Meter, ObjectMeta, OriginError};
use fletch_store::Store;
use fletch_tables::{ChunkRow, ObjectRef, TableError};
use futures::FutureExt as _;
use std::{ops::Range, sync::Arc, time::Duration};
use tokio::time::timeout;

/// The longest chunk that is read from a disk of this machine on the thread that asks for it, in bytes.
const NEAR_BYTES_MAX: u32 = 256 << 10;
/// The longest wait for the hashes of a chunk's groups.
const GROUPS_WITHIN: Duration = Duration::from_secs(2);
/// The most bytes that a probe reads.
const PROBE_BYTES: u64 = 64 << 10;

/// A chunk of a version, with the source and the row that locate it.
#[derive(Clone)]
pub struct LocatedChunk {
    /// The chunk's length in bytes.
    pub len: u32,
    pub(super) source: Arc<Source>,
    pub(super) row: PartRow,
}

impl LocatedChunk {
    pub(super) fn new(source: &Arc<Source>, row: PartRow) -> Self {
        LocatedChunk { len: row.row.len, source: Arc::clone(source), row }
    }

    /// Returns the chunk of a row of the source's own table.
    #[must_use]
    pub fn from_row(source: &Arc<Source>, part: usize, row: ChunkRow) -> Self {
        LocatedChunk::new(source, PartRow { part, row })
    }

    /// Returns what a read of the chunk for the readers of `sources` needs to know before it begins.
    #[must_use]
    pub fn cold<'a>(&'a self, store: &'a Store, key: &'a StoreKey, sources: &Sources) -> ColdChunk<'a> {
        let at = self.home_origin();
        let stream = (sources.domain.clone(), sources.dataset().clone());
        ColdChunk { store, key, len: self.len, origin: at.origin(), stream }
    }

    /// Returns the hashes of the chunk's groups, if its layout has them at rest and they are right. Waits for
    /// [`GROUPS_WITHIN`] at most: the chunk can be read without them.
    pub async fn groups_at_rest(&self) -> Option<GroupHashes> {
        let chunk = self.row.row.chunk;
        let read = timeout(GROUPS_WITHIN, self.source.version.group_hashes(chunk, self.len));
        match pass_gate(Gate::Tables, read).await {
            Ok(Ok(groups)) => groups,
            Err(_) => {
                tracing::debug!(%chunk, "hashes of groups do not come; the whole chunk is read");
                None
            }
            Ok(Err(error)) => {
                tracing::warn!(%chunk, %error, "hashes of groups cannot be read; the whole chunk is read");
                None
            }
        }
    }

    /// Returns the bytes of all chunks of the chunk's layout, as the layout says.
    #[must_use]
    pub fn layout_bytes(&self) -> u64 {
        self.source.version.layout_doc().bytes
    }

    /// Whether the chunk is short and lies in a directory on a disk of this machine.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.len <= NEAR_BYTES_MAX && self.home_origin().is_near()
    }

    fn home_origin(&self) -> &HomeOrigin {
        match self.row.row.object {
            // Packs lie beside the tables, wherever the data is.
            ObjectRef::Key(_) => &self.source.tables,
            ObjectRef::Entry { .. } => &self.source.data,
        }
    }

    /// Checks that the chunk's name, in a draft, is that of the bytes where its row says that they are. So a
    /// table that somebody made up teaches nothing.
    ///
    /// # Errors
    /// A damaged table; those of reading the tables.
    pub async fn check_name(&self) -> Result<(), VersionError> {
        let (source, row) = (&self.source, &self.row.row);
        let object = source.object_of(&self.row).await?;
        let uri = object.origin.uri().to_string();
        let state = ObjectState {
            uri: &uri,
            path: &object.path,
            size: object.pin.size,
            mtime_ns: object.pin.mtime_ns,
            etag: object.pin.etag.as_deref(),
        };
        if state.location_name(row.offset, u64::from(row.len)) == row.chunk {
            return Ok(());
        }
        let why = format!("the name of bytes of {} is not that of their place", object.name());
        Err(TableError::Damaged { table: "chunks.parquet", why }.into())
    }

    /// Returns the offset of the chunk in its file, if it is not all of the file.
    #[must_use]
    pub fn slice_offset(&self) -> Option<u64> {
        let row = &self.row.row;
        (u64::from(row.len) != row.pin.size).then_some(row.offset)
    }

    /// Fills `buffer`, which is as long as the chunk, with the bytes of a chunk that is near. Returns
    /// whether it could. The bytes are not verified. `meter` counts them.
    #[must_use]
    pub fn fill_here(&self, meter: &Meter, buffer: &mut [u8]) -> bool {
        // Without the part of the tables in memory, it would have to wait.
        let Some(Ok(object)) = self.source.object_of(&self.row).now_or_never() else { return false };
        let changed = object.origin.home().changed_objects();
        // A read that compares pins finds out whether the object has the indexed bytes again.
        if changed.contains(&self.source.registered, &object.name()) {
            return false;
        }
        let at = (self.row.row.offset, &object.pin);
        match object.origin.fill_here(meter, &object.path, at, buffer) {
            Ok(()) => true,
            Err(e) => {
                tracing::debug!(error = %e, "cannot read a chunk on the thread that asks for it");
                false
            }
        }
    }

    /// Returns a range of the chunk, to be fetched under its own hash. `None` if it reaches past the end.
    #[must_use]
    pub fn slice(&self, range: &Range<usize>) -> Option<Self> {
        let (from, len) = (u64::try_from(range.start).ok()?, u32::try_from(range.len()).ok()?);
        if range.end > self.len as usize {
            return None;
        }
        let mut row = self.row.clone();
        row.row.offset += from;
        row.row.len = len;
        Some(LocatedChunk { len, source: Arc::clone(&self.source), row })
    }
}

/// Where the tables say that a chunk's bytes lie: pieces of objects that, in order, are the chunk.
#[derive(Clone)]
pub(super) struct ChunkLocation {
    pub pieces: Vec<ObjectPiece>,
    /// The registration of the source.
    registered: Arc<RegistrationHandle>,
    root: Root,
}

/// A range of an object.
#[derive(Clone)]
pub(super) struct ObjectPiece {
    pub object: ObjectLocation,
    pub offset: u64,
    pub len: u64,
}

impl ObjectPiece {
    /// Returns the range of the object.
    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }
}

impl ChunkLocation {
    /// Returns the location of these pieces, which are of one source.
    pub fn new(source: &Source, pieces: Vec<ObjectPiece>) -> Self {
        let (registered, root) = (Arc::clone(&source.registered), source.version.root());
        ChunkLocation { pieces, registered, root }
    }

    pub async fn of(source: &Source, row: &PartRow) -> Result<Self, VersionError> {
        let object = source.object_of(row).await?;
        let piece = ObjectPiece { object, offset: row.row.offset, len: row.row.len.into() };
        Ok(ChunkLocation::new(source, vec![piece]))
    }

    /// Returns the location with the home of its objects. `None` for a location without pieces.
    pub fn candidate(&self) -> Option<Candidate<ChunkLocation>> {
        let home = Arc::clone(self.pieces.first()?.object.origin.home());
        Some(Candidate { home, key: self.clone() })
    }

    /// Reads a few bytes of the location, to find out whether its home answers.
    pub async fn probe(&self) {
        let Some(p) = self.pieces.first() else { return };
        let range = p.offset..p.offset + p.len.min(PROBE_BYTES);
        p.object.origin.probe_get(&p.object.path, range, &p.object.pin).await;
    }

    /// Reads the pieces while their objects are exactly as the listing of a draft showed them: nothing else
    /// says whether the bytes are right.
    ///
    /// # Errors
    /// [`VersionError::Changed`], counted; those of the origin.
    pub async fn read_as_listed(&self, meter: &Meter) -> Result<Bytes, VersionError> {
        let [p] = &self.pieces[..] else { return Err(VersionError::NotFound) };
        let got = p.object.origin.get_content(meter, &p.object.path, p.range(), &p.object.pin).await;
        if let Err(OriginError::Changed { .. }) = &got {
            self.note_changed(p);
        }
        let got = got?;
        if let Some(why) = p.object.pin.difference(&got.meta.pin()) {
            self.note_changed(p);
            return Err(VersionError::Changed { what: p.object.name(), why });
        }
        Ok(got.bytes)
    }

    /// Reads the pieces from their origin. The bytes are not verified.
    ///
    /// `meter` counts them.
    pub async fn read(&self, meter: &Meter) -> Result<(Bytes, Vec<ObjectMeta>), OriginError> {
        let (mut all, mut metas) = (Vec::new(), Vec::new());
        for p in &self.pieces {
            let pin = p.object.origin.home().renewed_pins().pin_to_send(&self.key(p), &p.object.pin);
            let got = p.object.origin.get_content(meter, &p.object.path, p.range(), &pin).await;
            if let Err(OriginError::Changed { .. }) = &got {
                self.note_changed(p);
            }
            let got = got?;
            metas.push(got.meta);
            all.push(got.bytes);
        }
        let bytes = match all.len() {
            1 => all.swap_remove(0),
            _ => {
                let mut whole = BytesMut::with_capacity(all.iter().map(Bytes::len).sum());
                all.iter().for_each(|b| whole.extend_from_slice(b));
                whole.freeze()
            }
        };
        Ok((bytes, metas))
    }

    /// Returns the name of a piece's object among the renewed pins.
    fn key(&self, piece: &ObjectPiece) -> String {
        object_key(&self.registered.domain, piece.object.origin.uri(), &piece.object.path)
    }

    /// Counts the object of a piece as changed.
    pub fn note_changed(&self, piece: &ObjectPiece) {
        let changed = piece.object.origin.home().changed_objects();
        changed.add(&self.registered, self.root, &piece.object.name());
    }

    /// Returns how the object of a piece differs from its pin. `None` if it seems unchanged, or right bytes
    /// came under its new tag before.
    pub fn difference(&self, piece: &ObjectPiece, now: &ObjectMeta) -> Option<String> {
        let why = piece.object.pin.difference(&now.pin())?;
        let renewed = piece.object.origin.home().renewed_pins();
        (!renewed.knows(&self.key(piece), &piece.object.pin, now)).then_some(why)
    }

    /// Returns whether bytes that are right would say something new of an object.
    pub fn is_news(&self, metas: &[ObjectMeta]) -> bool {
        self.pieces.iter().zip(metas).any(|(p, meta)| {
            let home = p.object.origin.home();
            let is_remote = p.object.origin.origin().local_dir().is_none();
            is_remote && home.renewed_pins().is_news(&self.key(p), &p.object.pin, meta)
                || home.changed_objects().contains(&self.registered, &p.object.name())
        })
    }

    /// Records that the pieces had the right hash in answers with these metadata.
    pub fn note_right(&self, metas: &[ObjectMeta]) {
        for (p, meta) in self.pieces.iter().zip(metas) {
            let home = p.object.origin.home();
            home.changed_objects().remove(&self.registered, &p.object.name());
            let (key, pin) = (self.key(p), &p.object.pin);
            if p.object.origin.origin().local_dir().is_none() && home.renewed_pins().is_news(&key, pin, meta)
            {
                home.renewed_pins().note(&key, pin, meta, p.range());
            }
        }
    }
}
