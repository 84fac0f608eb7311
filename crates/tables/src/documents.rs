//! The JSON documents: manifest, layout, tag (`docs/FORMATS.md`, "Tables at rest" and "Tags").
//!
//! Readers refuse another `format` or `major`, and skip fields they do not know.

use crate::{TableError, source::DOCUMENT_BYTES_MAX};
use fletch_core::manifest::{
    FORMAT_MAJOR, FORMAT_MINOR, LayoutParams, PART_ENTRIES_MAX, PartSummary, SampleRule, layout::layout_id,
    root,
};
use fletch_core::{Hash, LayoutId, Root};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::time::{Duration, UNIX_EPOCH};

/// `format` of a manifest.
pub const MANIFEST: &str = "fletch.manifest";
/// `format` of a layout.
pub const LAYOUT: &str = "fletch.layout";
/// `format` of a tag.
pub const TAG: &str = "fletch.tag";

/// Something that was left out of a version (`--skip-failed`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its path, as text; bytes that are no UTF-8 are escaped by who wrote it.
    pub path: String,
    /// Why it was left out.
    pub why: String,
}

/// `manifest.json`: what a version is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always [`MANIFEST`].
    pub format: String,
    /// Version of the format.
    pub major: u32,
    /// Additions that a reader may ignore.
    pub minor: u32,
    /// The version's identity.
    pub root: Root,
    /// How entries form samples.
    pub sample_rule: SampleRule,
    /// Number of entries.
    pub entries: u64,
    /// Number of samples.
    pub samples: u64,
    /// Sum of the sizes of files and members.
    pub bytes: u64,
    /// When the version was made, RFC 3339 in UTC with nanoseconds.
    pub created: String,
    /// Program and version that made it.
    pub tool: String,
    /// What was left out, if it was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<Fault>,
    /// The parts, in order.
    pub parts: Vec<PartSummary>,
}

/// `layout.json`: how a version's bytes lie in chunks, and where those are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutDoc {
    /// Always [`LAYOUT`].
    pub format: String,
    /// Version of the format.
    pub major: u32,
    /// Additions that a reader may ignore.
    pub minor: u32,
    /// The layout's identity.
    pub layout: LayoutId,
    /// Which version it lays out.
    pub root: Root,
    /// What its chunks depend on.
    pub params: LayoutParams,
    /// Where the objects are (a URI); absent for the place these tables are in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// When the run began that read the objects, nanoseconds since 1970 UTC. A file whose
    /// mtime is less than 2 s before this is read again by a run with this as its parent.
    pub indexed_at_ns: u64,
    /// Rows of `chunks.parquet`.
    pub chunks: u64,
    /// Sum of their lengths.
    pub bytes: u64,
    /// Hash of each part's placement, in order.
    pub parts: Vec<Hash>,
}

/// `fletch/tags/<tag>`: what a tag names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagDoc {
    /// Always [`TAG`].
    pub format: String,
    /// Version of the format.
    pub major: u32,
    /// Additions that a reader may ignore.
    pub minor: u32,
    /// The version.
    pub root: Root,
    /// The layout of it that is preferred.
    pub layout: LayoutId,
    /// When the tag was moved here, RFC 3339 in UTC with nanoseconds.
    pub created: String,
}

fn tag_format() -> String {
    TAG.to_owned()
}

/// A time as the documents write it.
#[must_use]
pub fn rfc3339(unix_ns: u64) -> String {
    humantime::format_rfc3339_nanos(UNIX_EPOCH + Duration::from_nanos(unix_ns)).to_string()
}

/// The time a document writes, in nanoseconds since 1970 UTC; `None` when it is none or earlier.
#[must_use]
pub fn unix_ns(created: &str) -> Option<u64> {
    let t = humantime::parse_rfc3339(created).ok()?;
    u64::try_from(t.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()
}

#[derive(Deserialize)]
struct Head {
    format: String,
    major: u32,
}

fn parse<T: DeserializeOwned>(table: &'static str, format: &str, bytes: &[u8]) -> Result<T, TableError> {
    let damaged = |why: String| TableError::Damaged { table, why };
    let len = bytes.len() as u64;
    if len > DOCUMENT_BYTES_MAX {
        return Err(TableError::Limit { table, what: "bytes", got: len, limit: DOCUMENT_BYTES_MAX });
    }
    // The head first, so that a newer document is called newer and not damaged.
    let head: Head = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
    if head.format != format {
        let shown: String = head.format.chars().take(40).collect();
        return Err(damaged(format!("its format is {shown:?}, expected {format:?}")));
    }
    if head.major != FORMAT_MAJOR {
        return Err(TableError::Newer { table, major: head.major, known: FORMAT_MAJOR });
    }
    serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))
}

fn write<T: Serialize>(doc: &T) -> Result<Vec<u8>, TableError> {
    let mut out = serde_json::to_vec_pretty(doc).map_err(|e| TableError::Internal(e.to_string()))?;
    out.push(b'\n');
    Ok(out)
}

impl Manifest {
    /// Reads a manifest and checks that it is the one of `expected`.
    ///
    /// # Errors
    /// [`TableError`]: damaged, newer, or of another root.
    pub fn parse(bytes: &[u8], expected: Root) -> Result<Self, TableError> {
        let m: Manifest = parse("manifest.json", MANIFEST, bytes)?;
        let damaged = |why: &str| Err(TableError::Damaged { table: "manifest.json", why: why.to_owned() });
        let hashes: Vec<Hash> = m.parts.iter().map(|p| p.hash).collect();
        let got = root(&m.sample_rule, &hashes);
        if got != expected || m.root != expected {
            return Err(TableError::Root { expected, got });
        }
        if m.parts.iter().any(|p| p.entries == 0 || p.entries > PART_ENTRIES_MAX) {
            return damaged("a part has no entries or more than 65,536");
        }
        if m.parts.iter().map(|p| u64::from(p.entries)).sum::<u64>() != m.entries {
            return damaged("its parts do not add up to its entries");
        }
        if m.parts.windows(2).any(|w| w[0].first.as_bytes() >= w[1].first.as_bytes()) {
            return damaged("its parts are not in path order");
        }
        if unix_ns(&m.created).is_none() {
            return damaged("its time of creation cannot be read");
        }
        Ok(m)
    }

    /// The document as it is written.
    ///
    /// # Errors
    /// [`TableError::Internal`] only.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        write(self)
    }

    /// When the version was made, nanoseconds since 1970 UTC.
    #[must_use]
    pub fn created_ns(&self) -> u64 {
        unix_ns(&self.created).unwrap_or(0)
    }
}

impl LayoutDoc {
    /// Reads a layout and checks that it is `expected`, of `of`, which has `parts` parts.
    ///
    /// # Errors
    /// [`TableError`]: damaged, newer, or another layout.
    pub fn parse(bytes: &[u8], expected: LayoutId, of: Root, parts: usize) -> Result<Self, TableError> {
        let l = Self::parse_any(bytes)?;
        let got = layout_id(&l.params, of, &l.parts);
        if got != expected || l.layout != expected || l.root != of || l.parts.len() != parts {
            return Err(TableError::Layout { expected, got });
        }
        Ok(l)
    }

    /// Reads a layout and checks only that it is consistent in itself (for listing layouts).
    ///
    /// # Errors
    /// [`TableError`]: damaged, newer, or not the layout it says it is.
    pub fn parse_any(bytes: &[u8]) -> Result<Self, TableError> {
        let l: LayoutDoc = parse("layout.json", LAYOUT, bytes)?;
        let got = layout_id(&l.params, l.root, &l.parts);
        if got != l.layout {
            return Err(TableError::Layout { expected: l.layout, got });
        }
        match l.params.check() {
            Ok(()) => Ok(l),
            Err(why) => Err(TableError::Damaged { table: "layout.json", why: why.to_owned() }),
        }
    }

    /// The document as it is written.
    ///
    /// # Errors
    /// [`TableError::Internal`] only.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        write(self)
    }
}

impl TagDoc {
    /// A tag moved at `created_ns`.
    #[must_use]
    pub fn new(root: Root, layout: LayoutId, created_ns: u64) -> Self {
        TagDoc {
            format: tag_format(),
            major: FORMAT_MAJOR,
            minor: FORMAT_MINOR,
            root,
            layout,
            created: rfc3339(created_ns),
        }
    }

    /// Reads a tag.
    ///
    /// # Errors
    /// [`TableError`]: damaged or newer.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        parse("tag", TAG, bytes)
    }

    /// The document as it is written.
    ///
    /// # Errors
    /// [`TableError::Internal`] only.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        write(self)
    }
}
