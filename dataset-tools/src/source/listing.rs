//! The objects of a dataset in a store, in byte order: from the store's listing, or from a list of names.
//!
//! A plain HTTP server has no listing and needs a list of names. Each line of the list is a path below the
//! dataset, or a URI below the URI of the dataset. The list may be in any order. Empty lines are skipped, and
//! a name that comes twice counts once.

use super::sampler::directory;
use super::walk::{NAMES_BYTES_MAX, Step, Symlinks, Walk, WalkOptions};
use crate::failure::Failure;
use fletch_core::manifest::tar::shard::is_shard;
use fletch_origin::{ObjectMeta, Origin, OriginError, OriginUri, Origins};
use fletch_tables::paths;
use futures::stream::{BoxStream, Fuse};
use futures::{StreamExt, TryStreamExt, stream};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The longest list, in bytes of names. The list is in memory.
const LIST_BYTES_MAX: u64 = 1 << 30;
/// The longest line, in bytes: a URI of the longest path with every byte encoded.
const LINE_BYTES_MAX: usize = 16 << 10;
/// HEAD requests under way at once.
const HEADS_MAX: usize = 64;
/// The number of first files whose names decide whether a dataset has tar shards.
const FIRST_FILES: usize = 1000;
/// The number of first files, of a dataset with shards, that are looked at for directories with shards.
const SHARD_FILES_MAX: usize = 100_000;

/// The names of a `--list` file, sorted by their bytes, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameList(Arc<Vec<Box<str>>>);

/// One item of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    /// An object.
    Object(ObjectMeta),
    /// A name that cannot be an entry.
    Fault {
        /// Its path, with unprintable bytes escaped.
        path: String,
        /// Why, and what to do next.
        why: String,
    },
}

impl NameList {
    /// Reads the list in `file` for the dataset at `uri`.
    ///
    /// # Errors
    /// A usage [`Failure`] with the number of the first line that does not name an object of the dataset.
    pub fn read(file: &Path, uri: &OriginUri) -> Result<NameList, Failure> {
        let cannot = |e: &std::io::Error| Failure::io(format_args!("the list {}", file.display()), e);
        let mut from = BufReader::new(std::fs::File::open(file).map_err(|e| cannot(&e))?);
        let mut names: Vec<Box<str>> = Vec::new();
        let (mut bytes, mut number) = (0u64, 0u64);
        let mut line = Vec::new();
        loop {
            line.clear();
            let limit = LINE_BYTES_MAX as u64 + 1;
            let read = std::io::Read::take(&mut from, limit).read_until(b'\n', &mut line);
            if read.map_err(|e| cannot(&e))? == 0 {
                break;
            }
            number += 1;
            let wrong = |why: String| {
                Failure::usage(format!("{}, line {number}: {why}", file.display()))
                    .hint("write one path or URI below the dataset on each line")
            };
            let text = std::str::from_utf8(&line).map_err(|_| wrong("the name is not UTF-8".into()))?;
            if line.len() > LINE_BYTES_MAX {
                return Err(wrong("the line is longer than any path or URI can be".into()));
            }
            let text = text.strip_suffix('\n').unwrap_or(text);
            let text = text.strip_suffix('\r').unwrap_or(text);
            if text.is_empty() {
                continue;
            }
            let name = relative(text, uri).map_err(wrong)?;
            bytes += name.len() as u64;
            if bytes > LIST_BYTES_MAX {
                return Err(wrong(format!("the list has more than {LIST_BYTES_MAX} bytes of names")));
            }
            names.push(name.into());
        }
        names.sort_unstable();
        names.dedup();
        Ok(NameList(Arc::new(names)))
    }
}

/// Returns the path below `uri` that a line names.
fn relative(text: &str, uri: &OriginUri) -> Result<String, String> {
    let is_uri = text
        .split_once("://")
        .is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric()));
    let object = match is_uri {
        true => OriginUri::parse(text).map_err(|e| e.to_string())?,
        false => uri.join(text).map_err(|e| e.to_string())?,
    };
    let below = object.below(uri).filter(|rel| !rel.is_empty());
    below.ok_or_else(|| format!("{object} is not below {uri}"))
}

/// The objects of a dataset, in byte order of their paths, without what is not part of a version.
pub struct Objects {
    list: Fuse<BoxStream<'static, Result<Listed, OriginError>>>,
    /// The object before, until the next one shows that it is not a folder marker.
    held: Option<ObjectMeta>,
    exclude: BTreeSet<String>,
}

impl Objects {
    /// Begins before the first object. Leaves out `fletch/` and everything below `exclude`.
    #[must_use]
    pub fn new(origin: &Origin, names: Option<&NameList>, exclude: BTreeSet<String>) -> Self {
        Objects { list: all_objects(origin, names).fuse(), held: None, exclude }
    }

    /// Returns the next object or fault; `None` at the end.
    ///
    /// # Errors
    /// [`Failure`] when the listing fails or the origin is away.
    pub async fn next(&mut self) -> Result<Option<Listed>, Failure> {
        loop {
            let item = match self.list.next().await.transpose()? {
                Some(Listed::Object(item)) => item,
                Some(fault) => return Ok(Some(fault)),
                None => return Ok(self.held.take().map(listed)),
            };
            let below = |dir: &str| item.path.strip_prefix(dir).is_some_and(|r| r.starts_with('/'));
            if item.path.starts_with(paths::PREFIX) || self.exclude.iter().any(|dir| below(dir)) {
                continue;
            }
            // Some programs write an empty object as a marker of a folder.
            let is_marker = self.held.as_ref().is_some_and(|held| held.size == 0 && below(&held.path));
            let before = self.held.replace(item);
            if !is_marker && before.is_some() {
                return Ok(before.map(listed));
            }
        }
    }
}

fn listed(object: ObjectMeta) -> Listed {
    let clean = |c: &str| !c.is_empty() && c != "." && c != "..";
    if !object.path.contains('\0') && object.path.split('/').all(clean) {
        return Listed::Object(object);
    }
    let why = "its key has an empty, `.` or `..` component or a NUL byte; rename the object";
    Listed::Fault { path: object.path.escape_debug().to_string(), why: why.into() }
}

fn all_objects(origin: &Origin, names: Option<&NameList>) -> BoxStream<'static, Result<Listed, OriginError>> {
    let Some(names) = names else {
        return origin.list("").map(|item| item.map(Listed::Object)).boxed();
    };
    let (origin, names) = (origin.clone(), names.clone());
    let count = names.0.len();
    stream::iter(0..count)
        .map(move |i| {
            let (origin, path) = (origin.clone(), names.0[i].to_string());
            async move {
                match origin.head(&path).await {
                    Ok(meta) => Ok(Listed::Object(meta)),
                    // An origin that is away is not a fault of this object.
                    Err(e) if e.transient() => Err(e),
                    Err(e) => Ok(Listed::Fault { path, why: e.to_string() }),
                }
            }
        })
        .buffered(HEADS_MAX)
        .boxed()
}

/// Returns the directories that have a tar shard, if one of the first [`FIRST_FILES`] files, in path order,
/// is one; otherwise none.
///
/// Looks at the first [`SHARD_FILES_MAX`] files, by their names alone. Ignores a directory that cannot be
/// read: the run itself reports it.
///
/// # Errors
/// [`Failure`] when the listing of a store fails.
pub fn shard_directories(
    rt: &Handle,
    origins: &Origins,
    uri: &OriginUri,
    names: Option<&NameList>,
) -> Result<BTreeSet<String>, Failure> {
    let mut found = ShardDirs::default();
    if let Some(names) = names {
        let _all_or_enough = names.0.iter().try_for_each(|name| found.see(name));
        return Ok(found.dirs);
    }
    let Some(dir) = uri.as_local() else {
        let origin = origins.open(uri)?;
        let mut objects = origin.list("");
        while let Some(object) = rt.block_on(objects.try_next())? {
            if !object.path.starts_with(paths::PREFIX) && found.see(&object.path).is_break() {
                break;
            }
        }
        return Ok(found.dirs);
    };
    let options = WalkOptions {
        base: dir.to_owned(),
        symlinks: Symlinks::Keep,
        exclude: BTreeSet::from(["fletch".to_owned()]),
        one_file_system: false,
        names_bytes_max: NAMES_BYTES_MAX,
    };
    let Ok(mut walk) = Walk::new(options, &std::env::temp_dir()) else { return Ok(found.dirs) };
    while let Ok(Some(step)) = walk.next_step() {
        if let Step::File { path, .. } = step
            && found.see(&path).is_break()
        {
            break;
        }
    }
    Ok(found.dirs)
}

/// The directories with shards among the files so far.
#[derive(Default)]
struct ShardDirs {
    files: usize,
    dirs: BTreeSet<String>,
}

impl ShardDirs {
    /// Looks at the next file. Breaks when the files after it do not matter.
    fn see(&mut self, path: &str) -> ControlFlow<()> {
        if is_shard(path) && !self.dirs.contains(directory(path)) {
            self.dirs.insert(directory(path).to_owned());
        }
        self.files += 1;
        let enough = if self.dirs.is_empty() { FIRST_FILES } else { SHARD_FILES_MAX };
        if self.files < enough { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], uri: &str) -> Result<Vec<String>, Failure> {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("list");
        std::fs::write(&file, text).expect("write");
        let names = NameList::read(&file, &OriginUri::parse(uri).expect("uri"))?;
        Ok(names.0.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn lines_are_paths_or_uris_below_the_dataset() {
        let text = b"b\n\na/x y\r\nhttps://h/d/c%20d\na/x y\nhttps://h/d/e?\n";
        let error = read(text, "https://h/d").expect_err("a query").what;
        assert!(error.contains("line 6"), "{error}");
        let text = b"b\n\na/x%20y\r\nhttps://h/d/c%20d\nb\n#1\nwith: colon";
        let names = read(text, "https://h/d").expect("names");
        assert_eq!(names, ["#1", "a/x%20y", "b", "c d", "with: colon"]);
        assert_eq!(read(b"s3://bucket/p/a b", "s3://bucket/p").expect("names"), ["a b"]);
        assert_eq!(read(b"", "s3://bucket/p").expect("names"), [""; 0]);
    }

    #[test]
    fn a_name_outside_the_dataset_is_refused_with_its_line() {
        let texts: [&[u8]; 7] = [
            b"ok\n../x",
            b"ok\n/etc/passwd",
            b"ok\na//b",
            b"ok\nhttps://h/dx/a",
            b"ok\nhttps://other/d/a",
            b"ok\nhttps://h/d",
            b"ok\n\xff",
        ];
        for text in texts {
            let failure = read(text, "https://h/d").expect_err("wrong");
            assert!(failure.what.contains("line 2"), "{}", failure.what);
        }
        let long = [b"ok\n".as_slice(), &vec![b'a'; 20_000]].concat();
        assert!(read(&long, "https://h/d").expect_err("long").what.contains("longer"));
    }
}
