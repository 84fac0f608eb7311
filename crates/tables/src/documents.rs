//! The JSON documents: manifest, layout, tag (`docs/FORMATS.md`, "Tables at rest" and "Tags").
//!
//! A reader refuses another `format` or `major`, and skips fields that it does not know.

use crate::{TableError, source::DOCUMENT_BYTES_MAX};
use fletch_core::manifest::{
    FORMAT_MAJOR, FORMAT_MINOR, LayoutParams, PART_ENTRIES_MAX, PartSummary, SampleRule, layout::layout_id,
    root,
};
use fletch_core::{Hash, LayoutId, Root};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::time::{Duration, UNIX_EPOCH};

/// The value of `format` in a manifest.
pub const MANIFEST: &str = "fletch.manifest";
/// The value of `format` in a layout.
pub const LAYOUT: &str = "fletch.layout";
/// The value of `format` in a tag.
pub const TAG: &str = "fletch.tag";

/// A file that was left out of a version by `--skip-failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The file's path, as text. The writer escapes bytes that are not UTF-8.
    pub path: String,
    /// The reason.
    pub why: String,
}

/// `manifest.json`: the description of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always [`MANIFEST`].
    pub format: String,
    /// The major version of the format.
    pub major: u32,
    /// The minor version: additions that a reader may ignore.
    pub minor: u32,
    /// The version's identity.
    pub root: Root,
    /// The rule by which entries form samples.
    pub sample_rule: SampleRule,
    /// The number of entries.
    pub entries: u64,
    /// The number of samples.
    pub samples: u64,
    /// The sum of the sizes of files and members, in bytes.
    pub bytes: u64,
    /// The number of files, without members, links and empty directories. Absent if all entries are files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
    /// The sum of the sizes of the files, without members, in bytes. Absent if no entry is a member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// The time when the version was made, RFC 3339 in UTC with nanoseconds.
    pub created: String,
    /// The program that made the version, with its version number.
    pub tool: String,
    /// The files that were left out by `--skip-failed`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<Fault>,
    /// The parts, in order.
    pub parts: Vec<PartSummary>,
}

/// The size of a version as a mount shows it: the members of a tar shard count with their shard only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileTotals {
    /// The number of files.
    pub files: u64,
    /// The sum of their sizes, in bytes.
    pub bytes: u64,
}

/// `layout.json`: how a version's bytes lie in chunks, and where the chunks are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutDoc {
    /// Always [`LAYOUT`].
    pub format: String,
    /// The major version of the format.
    pub major: u32,
    /// The minor version: additions that a reader may ignore.
    pub minor: u32,
    /// The layout's identity.
    pub layout: LayoutId,
    /// The version that it lays out.
    pub root: Root,
    /// The parameters that decide the chunks.
    pub params: LayoutParams,
    /// The URI of the folder that holds the objects. Absent if it is the folder of these tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The time when the run that read the objects began, in nanoseconds since 1970 UTC.
    ///
    /// A run with this layout as its parent reads a file again if its mtime is less than 2 s before this
    /// time.
    pub indexed_at_ns: u64,
    /// The number of rows of `chunks.parquet`.
    pub chunks: u64,
    /// The sum of the chunks' lengths, in bytes.
    pub bytes: u64,
    /// The number of chunks whose groups `groups.bin` has. Absent if there is no such file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grouped_chunks: Option<u64>,
    /// The hash of each part's placement, in order.
    pub parts: Vec<Hash>,
}

/// `fletch/tags/<tag>`: the version and layout that a tag names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagDoc {
    /// Always [`TAG`].
    pub format: String,
    /// The major version of the format.
    pub major: u32,
    /// The minor version: additions that a reader may ignore.
    pub minor: u32,
    /// The version that the tag names.
    pub root: Root,
    /// The preferred layout of the version.
    pub layout: LayoutId,
    /// The time when the tag was moved to this version, RFC 3339 in UTC with nanoseconds.
    pub created: String,
}

/// Returns a time as the documents write it.
#[must_use]
pub fn rfc3339(unix_ns: u64) -> String {
    humantime::format_rfc3339_nanos(UNIX_EPOCH + Duration::from_nanos(unix_ns)).to_string()
}

/// Parses a document's time. Returns nanoseconds since 1970 UTC; `None` for an earlier time or other text.
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
    // The head is parsed first, so that the error of a newer document says that it is newer.
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
    /// Parses a manifest, and checks that it describes the root `expected`.
    ///
    /// # Errors
    /// [`TableError`]: the document is damaged, of a newer format, or of another root.
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
            return damaged("the entries of its parts do not add up to its entries");
        }
        if m.parts.windows(2).any(|w| w[0].first.as_bytes() >= w[1].first.as_bytes()) {
            return damaged("its parts are not in path order");
        }
        if unix_ns(&m.created).is_none() {
            return damaged("its time of creation is not an RFC 3339 time");
        }
        Ok(m)
    }

    /// Returns the document as JSON text.
    ///
    /// # Errors
    /// [`TableError::Internal`] only.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        write(self)
    }

    /// Returns the number and the bytes of the files that a mount shows.
    ///
    /// Tables of 0.1.0 do not count their files. Then all entries count, with the members of tar shards.
    #[must_use]
    pub fn shown(&self) -> FileTotals {
        FileTotals { files: self.files.unwrap_or(self.entries), bytes: self.file_bytes.unwrap_or(self.bytes) }
    }

    /// Returns the time when the version was made, in nanoseconds since 1970 UTC.
    #[must_use]
    pub fn created_ns(&self) -> u64 {
        unix_ns(&self.created).unwrap_or(0)
    }
}

impl LayoutDoc {
    /// Parses a layout, and checks that it is the layout `expected` of the version `of` with `parts` parts.
    ///
    /// # Errors
    /// [`TableError`]: the document is damaged, of a newer format, or another layout.
    pub fn parse(bytes: &[u8], expected: LayoutId, of: Root, parts: usize) -> Result<Self, TableError> {
        let l = Self::parse_any(bytes)?;
        let got = layout_id(&l.params, of, &l.parts);
        if got != expected || l.layout != expected || l.root != of || l.parts.len() != parts {
            return Err(TableError::Layout { expected, got });
        }
        Ok(l)
    }

    /// Parses a layout, and checks only that its content matches its own id. Listings use this.
    ///
    /// # Errors
    /// [`TableError`]: the document is damaged, of a newer format, or does not match its own id.
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

    /// Returns the document as JSON text.
    ///
    /// # Errors
    /// [`TableError::Internal`] only.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        write(self)
    }
}

impl TagDoc {
    /// Returns a tag that was moved at `created_ns`, in nanoseconds since 1970 UTC.
    #[must_use]
    pub fn new(root: Root, layout: LayoutId, created_ns: u64) -> Self {
        TagDoc {
            format: TAG.to_owned(),
            major: FORMAT_MAJOR,
            minor: FORMAT_MINOR,
            root,
            layout,
            created: rfc3339(created_ns),
        }
    }

    /// Parses a tag.
    ///
    /// # Errors
    /// [`TableError`]: the document is damaged or of a newer format.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        parse("tag", TAG, bytes)
    }

    /// Returns the document as JSON text.
    ///
    /// # Errors
    /// [`TableError::Internal`] only.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        write(self)
    }
}
