//! Remembers where `index` and `pack` of this account wrote the tables of a dataset, so that `register` finds
//! them, and so that an error can name forgotten tables.
//!
//! Keeps one small JSON file for each dataset, replaced as a whole. The file may be deleted at any time. It
//! holds no secret, and nothing is read by it without the checks of every other table.

use fletch_core::manifest::LayoutKind;
use fletch_core::{Hash, LayoutId, Root};
use fletch_host::replace::replace_shared_file;
use fletch_origin::OriginUri;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The most places that are remembered for one dataset. The oldest are forgotten first.
const PLACES_MAX: usize = 16;
/// The longest file that is read, in bytes.
const BYTES_MAX: u64 = 64 << 10;

/// A place to which a run wrote the tables of a dataset, and the version that it wrote last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenTables {
    /// The URI of the tables.
    pub tables: String,
    /// The root of the version.
    pub root: Root,
    /// The layout of the version.
    pub layout: LayoutId,
    /// The kind of the layout.
    pub kind: LayoutKind,
    /// When the run ended, in nanoseconds since 1970.
    pub at_ns: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    /// The dataset.
    uri: String,
    /// The places, the latest last.
    places: Vec<WrittenTables>,
}

fn path_of(state_dir: &Path, uri: &str) -> PathBuf {
    state_dir.join("written").join(format!("{}.json", &Hash::of(uri.as_bytes()).to_string()[..24]))
}

fn read(path: &Path, uri: &str) -> io::Result<Record> {
    match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Record::default()),
        Err(e) => return Err(e),
        Ok(meta) if meta.len() > BYTES_MAX => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is longer than 64 KiB"));
        }
        Ok(_) => {}
    }
    let record: Record = serde_json::from_slice(&fs::read(path)?)?;
    // The file name is a short hash, so two datasets may share it.
    Ok(if record.uri == uri { record } else { Record::default() })
}

/// Records that a run wrote tables of a dataset.
///
/// # Errors
/// The error of the file.
pub fn record(state_dir: &Path, uri: &OriginUri, written: WrittenTables) -> io::Result<()> {
    let uri = uri.to_string();
    let path = path_of(state_dir, &uri);
    // A damaged record is replaced.
    let mut places = read(&path, &uri).unwrap_or_default().places;
    places.retain(|place| place.tables != written.tables);
    places.push(written);
    let from = places.len().saturating_sub(PLACES_MAX);
    let text = serde_json::to_vec_pretty(&Record { uri, places: places.split_off(from) })?;
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    replace_shared_file(&path, &text)
}

/// Returns the places where runs wrote tables of a dataset, the latest last. None for an unreadable record.
#[must_use]
pub fn places(state_dir: &Path, uri: &OriginUri) -> Vec<WrittenTables> {
    let uri = uri.to_string();
    read(&path_of(state_dir, &uri), &uri).unwrap_or_default().places
}

/// Returns the place to read a dataset from: of the version that was written last, a packed layout before
/// an index, and the latest of several.
#[must_use]
pub fn best(places: &[WrittenTables]) -> Option<&WrittenTables> {
    let latest = places.iter().max_by_key(|place| place.at_ns)?;
    let same = places.iter().filter(|place| place.root == latest.root);
    same.max_by_key(|place| (place.kind == LayoutKind::Pack, place.at_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(tables: &str, root: &[u8], kind: LayoutKind, at_ns: u64) -> WrittenTables {
        let (root, layout) = (Root(Hash::of(root)), LayoutId(Hash::of(b"l")));
        WrittenTables { tables: tables.into(), root, layout, kind, at_ns }
    }

    #[test]
    fn a_pack_of_the_latest_version_wins() {
        let (index, pack) = (LayoutKind::Index, LayoutKind::Pack);
        let best_of = |places: &[WrittenTables]| best(places).map(|p| p.tables.clone());
        assert_eq!(best_of(&[]), None);
        let mut all = vec![place("a", b"1", pack, 1), place("b", b"1", index, 2)];
        assert_eq!(best_of(&all).as_deref(), Some("a"), "the same version, packed before");
        all.push(place("c", b"2", index, 3));
        assert_eq!(best_of(&all).as_deref(), Some("c"), "the pack is of an older version");
        all.push(place("d", b"2", pack, 4));
        assert_eq!(best_of(&all).as_deref(), Some("d"));
    }

    #[test]
    fn places_are_remembered_by_dataset_and_bounded() {
        let dir = tempfile::tempdir().expect("tempdir");
        let uri = |text: &str| OriginUri::parse(text).expect("uri");
        let (a, b) = (uri("s3://bucket/a"), uri("s3://bucket/b"));
        assert_eq!(places(dir.path(), &a), []);
        for n in 0..20u64 {
            record(dir.path(), &a, place(&format!("t{n}"), b"1", LayoutKind::Index, n)).expect("recorded");
        }
        record(dir.path(), &a, place("t10", b"1", LayoutKind::Pack, 99)).expect("again");
        let kept = places(dir.path(), &a);
        assert_eq!((kept.len(), kept.last().map(|p| p.at_ns)), (PLACES_MAX, Some(99)));
        assert_eq!(kept.iter().filter(|p| p.tables == "t10").count(), 1);
        assert_eq!(places(dir.path(), &b), []);
        let file = fs::read_dir(dir.path().join("written")).expect("dir").next().expect("one");
        fs::write(file.expect("entry").path(), b"{").expect("damage");
        assert_eq!(places(dir.path(), &a), [], "a damaged record is no record");
        record(dir.path(), &a, place("x", b"1", LayoutKind::Index, 1)).expect("replaced");
        assert_eq!(places(dir.path(), &a).len(), 1);
    }
}
