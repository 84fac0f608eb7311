//! The objects: a directory, a map, or lengths.

use super::Backing;
use bytes::{Bytes, BytesMut};
use rand::{RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// An object as it was when it was found.
pub(super) struct Object {
    pub size: u64,
    pub modified: SystemTime,
    /// With its quotes.
    pub etag: String,
    content: Content,
}

enum Content {
    Memory(Bytes),
    File(File),
    /// Made of a key whenever it is read.
    Sown([u8; 32]),
}

impl Object {
    pub fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        match &self.content {
            Content::Memory(bytes) => Ok(bytes.slice(range.start as usize..range.end as usize)),
            Content::File(file) => {
                let mut bytes = BytesMut::zeroed((range.end - range.start) as usize);
                file.read_exact_at(&mut bytes, range.start)?;
                Ok(bytes.freeze())
            }
            Content::Sown(key) => Ok(sown(*key, range)),
        }
    }
}

/// Part of an endless stream of bytes that no two keys have in common: ChaCha8's own, which can be entered at any word.
fn sown(key: [u8; 32], range: Range<u64>) -> Bytes {
    const WORD: u64 = 4;
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_word_pos(u128::from(range.start / WORD));
    let before = range.start % WORD;
    let mut bytes = BytesMut::zeroed((before + range.end - range.start) as usize);
    rng.fill_bytes(&mut bytes);
    bytes.freeze().slice(before as usize..)
}

/// A line of a listing.
pub(super) struct Listed {
    pub key: String,
    pub size: u64,
    pub modified: SystemTime,
    pub etag: String,
}

#[derive(Clone)]
struct Stored {
    bytes: Bytes,
    modified: SystemTime,
}

pub(super) struct Objects {
    place: Place,
    uploads: Mutex<BTreeMap<String, BTreeMap<u32, Bytes>>>,
}

enum Place {
    /// With the seed of what files without blocks hold, if they hold something.
    Directory(PathBuf, Option<u64>),
    Memory(Mutex<BTreeMap<String, Stored>>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn etag(bytes: &[u8]) -> String {
    format!("\"{}\"", &blake3::hash(bytes).to_hex()[..32])
}

fn etag_of(meta: &fs::Metadata) -> String {
    format!("\"{:x}-{:x}-{:x}-{:x}\"", meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
}

impl Objects {
    pub fn new(backing: Backing) -> Self {
        let place = match backing {
            Backing::Directory(dir) => Place::Directory(dir, None),
            Backing::Sown(dir, seed) => Place::Directory(dir, Some(seed)),
            Backing::Memory(map) => {
                let modified = SystemTime::now();
                let stored = map.into_iter().map(|(key, bytes)| (key, Stored { bytes, modified })).collect();
                Place::Memory(Mutex::new(stored))
            }
        };
        Objects { place, uploads: Mutex::default() }
    }

    pub fn find(&self, key: &str) -> Option<Object> {
        match &self.place {
            Place::Memory(map) => {
                let Stored { bytes, modified } = lock(map).get(key).cloned()?;
                let (size, etag) = (bytes.len() as u64, etag(&bytes));
                Some(Object { size, modified, etag, content: Content::Memory(bytes) })
            }
            Place::Directory(dir, seed) => {
                let path = file(dir, key)?;
                // A FIFO would hold the thread that opens it.
                fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
                let file = File::open(path).ok()?;
                let meta = file.metadata().ok()?;
                let modified = meta.modified().ok()?;
                let seed = seed.filter(|_| meta.blocks() == 0);
                let content = seed.map_or(Content::File(file), |seed| {
                    Content::Sown(
                        *blake3::Hasher::new()
                            .update(&seed.to_le_bytes())
                            .update(key.as_bytes())
                            .finalize()
                            .as_bytes(),
                    )
                });
                Some(Object { size: meta.len(), modified, etag: etag_of(&meta), content })
            }
        }
    }

    pub fn put(&self, key: &str, bytes: Bytes) -> io::Result<String> {
        match &self.place {
            Place::Memory(map) => {
                let etag = etag(&bytes);
                lock(map).insert(key.to_owned(), Stored { bytes, modified: SystemTime::now() });
                Ok(etag)
            }
            Place::Directory(dir, _) => {
                let path = file(dir, key).ok_or(io::ErrorKind::InvalidInput)?;
                if let Some(parent) = path.parent() {
                    fs::create_dir_all(parent)?;
                }
                // Replaced, not rewritten, so that readers of the old object keep it.
                let temporary = dir.join(format!(".emulator-{:x}", rand::random::<u64>()));
                fs::write(&temporary, &bytes)?;
                fs::rename(&temporary, &path)?;
                Ok(etag_of(&fs::metadata(&path)?))
            }
        }
    }

    /// Writes only if there is none; `None` if there was.
    pub fn create(&self, key: &str, bytes: Bytes) -> io::Result<Option<String>> {
        // One creator at a time is all the atomicity that one process needs.
        let _one = lock(&self.uploads);
        if self.find(key).is_some() { Ok(None) } else { self.put(key, bytes).map(Some) }
    }

    pub fn delete(&self, key: &str) {
        match &self.place {
            Place::Memory(map) => {
                lock(map).remove(key);
            }
            Place::Directory(dir, _) => {
                if let Some(path) = file(dir, key) {
                    // As at S3: what is not there is deleted.
                    let _ = fs::remove_file(path);
                }
            }
        }
    }

    /// Keys that begin with `prefix` and are greater than `after`, in byte order, and whether
    /// more than `max` are left.
    pub fn list(&self, prefix: &str, after: Option<&str>, max: usize) -> (Vec<Listed>, bool) {
        let fits = |key: &str| key.starts_with(prefix) && after.is_none_or(|after| key > after);
        let mut found: Vec<Listed> = match &self.place {
            Place::Memory(map) => lock(map)
                .iter()
                .filter(|(key, _)| fits(key))
                .take(max.saturating_add(1))
                .map(|(key, stored)| Listed {
                    key: key.clone(),
                    size: stored.bytes.len() as u64,
                    modified: stored.modified,
                    etag: etag(&stored.bytes),
                })
                .collect(),
            Place::Directory(dir, _) => {
                let mut keys = Vec::new();
                walk(dir, "", &mut keys);
                keys.retain(|key| fits(key));
                keys.sort_unstable();
                keys.truncate(max.saturating_add(1));
                keys.into_iter().filter_map(|key| self.listed(key)).collect()
            }
        };
        let more = found.len() > max;
        found.truncate(max);
        (found, more)
    }

    fn listed(&self, key: String) -> Option<Listed> {
        let Object { size, modified, etag, .. } = self.find(&key)?;
        Some(Listed { key, size, modified, etag })
    }

    pub fn begin_upload(&self) -> String {
        let id = format!("{:016x}", rand::random::<u64>());
        lock(&self.uploads).insert(id.clone(), BTreeMap::new());
        id
    }

    pub fn put_part(&self, id: &str, number: u32, bytes: Bytes) -> Option<String> {
        let tag = etag(&bytes);
        lock(&self.uploads).get_mut(id)?.insert(number, bytes);
        Some(tag)
    }

    pub fn abort_upload(&self, id: &str) -> bool {
        lock(&self.uploads).remove(id).is_some()
    }

    /// The etag; `None` for an upload or part that is not there.
    pub fn end_upload(&self, id: &str, key: &str, numbers: &[u32]) -> Option<io::Result<String>> {
        let parts = lock(&self.uploads).remove(id)?;
        let mut bytes = BytesMut::new();
        for number in numbers {
            bytes.extend_from_slice(parts.get(number)?);
        }
        Some(self.put(key, bytes.freeze()))
    }
}

/// The file of a key, if the key can name one below `dir`.
fn file(dir: &Path, key: &str) -> Option<PathBuf> {
    let clean = !key.contains('\0') && key.split('/').all(|c| !matches!(c, "" | "." | ".."));
    clean.then(|| dir.join(key))
}

fn walk(dir: &Path, at: &str, keys: &mut Vec<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (Ok(kind), Ok(name)) = (entry.file_type(), entry.file_name().into_string()) else { continue };
        if kind.is_dir() {
            walk(&entry.path(), &format!("{at}{name}/"), keys);
        } else if kind.is_file() {
            keys.push(format!("{at}{name}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sown_is_the_same_in_parts_and_never_twice() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["a", "b"] {
            File::create(dir.path().join(name)).expect("made").set_len(100_003).expect("as long as that");
        }
        let objects = |seed| Objects::new(Backing::Sown(dir.path().to_owned(), seed));
        let read =
            |seed, key: &str, range| objects(seed).find(key).expect("found").read(range).expect("read");
        let whole = read(1, "a", 0..100_003);
        assert_eq!(whole.len(), 100_003);
        for range in [0..1, 3..5, 4..100_003, 65_535..65_601, 99_999..100_003, 7..7] {
            assert_eq!(
                read(1, "a", range.clone()),
                whole[range.start as usize..range.end as usize],
                "{range:?}"
            );
        }
        assert!(read(1, "b", 0..100_003) != whole && read(2, "a", 0..100_003) != whole);
        assert_eq!(objects(1).find("a").expect("found").etag, objects(1).find("a").expect("found").etag);
        // What is really there is read, and what was put.
        objects(1).put("c", Bytes::from_static(b"real")).expect("put");
        assert_eq!(read(1, "c", 0..4), "real");
    }
}
