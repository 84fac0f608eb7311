//! What there is at a store: by its own listing, or by a list of names that was given, which is
//! the only way at a plain server.
//!
//! A list has one name a line: a path below the dataset, as it is, or a URI below the dataset's.
//! Empty lines are skipped, a name that is there twice counts once, and the order is of no matter.

use super::walk::{NAMES_BYTES_MAX as NAMES_BYTES_MAX_WALK, Step, Symlinks, Walk, WalkOptions};
use crate::failure::Failure;
use fletch_core::manifest::tar::shard::is_shard;
use fletch_origin::{ObjectMeta, Origin, OriginError, OriginUri, Origins};
use fletch_tables::paths;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt, stream};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The longest list, in bytes of names: it is held in memory.
const NAMES_BYTES_MAX: u64 = 1 << 30;
/// The longest name of a file, and of a URI with every byte encoded.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Requests under way that ask for the state of objects.
const HEADS_MAX: usize = 64;
/// Files whose names say whether a dataset is one of shards.
const LOOKED_AT: usize = 1000;

/// The names of a list, sorted by their bytes, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names(Arc<Vec<Box<str>>>);

/// One item of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    /// An object.
    Object(ObjectMeta),
    /// A name of a list whose object cannot be had.
    Fault {
        /// The name.
        path: String,
        /// Why.
        why: String,
    },
}

impl Names {
    /// Reads the list at `file` for the dataset at `uri`.
    ///
    /// # Errors
    /// A usage [`Failure`] with the number of the first line that is no name below the dataset.
    pub fn read(file: &Path, uri: &OriginUri) -> Result<Names, Failure> {
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
                return Err(wrong("the line is longer than any name".into()));
            }
            let text = text.strip_suffix('\n').unwrap_or(text);
            let text = text.strip_suffix('\r').unwrap_or(text);
            if text.is_empty() {
                continue;
            }
            let name = relative(text, uri).map_err(wrong)?;
            bytes += name.len() as u64;
            if bytes > NAMES_BYTES_MAX {
                return Err(wrong(format!("the list has more than {NAMES_BYTES_MAX} bytes of names")));
            }
            names.push(name.into());
        }
        names.sort_unstable();
        names.dedup();
        Ok(Names(Arc::new(names)))
    }
}

/// The path below `uri` that a line means.
fn relative(text: &str, uri: &OriginUri) -> Result<String, String> {
    let is_uri = text
        .split_once("://")
        .is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric()));
    let place = match is_uri {
        true => OriginUri::parse(text).map_err(|e| e.to_string())?,
        false => uri.join(text).map_err(|e| e.to_string())?,
    };
    place.below(uri).filter(|rel| !rel.is_empty()).ok_or_else(|| format!("{place} does not lie below {uri}"))
}

/// The objects of a dataset, in byte order of their paths.
#[must_use]
pub fn objects(origin: &Origin, names: Option<&Names>) -> BoxStream<'static, Result<Listed, OriginError>> {
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
                    // An origin that is away is no fault of this object.
                    Err(e) if e.transient() => Err(e),
                    Err(e) => Ok(Listed::Fault { path, why: e.to_string() }),
                }
            }
        })
        .buffered(HEADS_MAX)
        .boxed()
}

/// Whether there is a tar shard among the first [`LOOKED_AT`] files, in path order. What cannot be
/// listed is left to the run itself, which says so.
///
/// # Errors
/// When a store's listing fails.
pub fn begins_with_shards(
    rt: &Handle,
    origins: &Origins,
    uri: &OriginUri,
    names: Option<&Names>,
) -> Result<bool, Failure> {
    if let Some(names) = names {
        return Ok(names.0.iter().take(LOOKED_AT).any(|name| is_shard(name)));
    }
    let Some(dir) = uri.as_local() else {
        let origin = origins.open(uri)?;
        let first = origin.list("").take(LOOKED_AT);
        let any = first.try_any(|object| {
            std::future::ready(is_shard(&object.path) && !object.path.starts_with(paths::PREFIX))
        });
        return Ok(rt.block_on(any)?);
    };
    let options = WalkOptions {
        base: dir.to_owned(),
        symlinks: Symlinks::Keep,
        exclude: BTreeSet::from(["fletch".to_owned()]),
        names_bytes_max: NAMES_BYTES_MAX_WALK,
    };
    let Ok(mut walk) = Walk::new(options, &std::env::temp_dir()) else { return Ok(false) };
    for _ in 0..LOOKED_AT {
        match walk.next_step() {
            Ok(Some(Step::File { path, .. })) if is_shard(&path) => return Ok(true),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], uri: &str) -> Result<Vec<String>, Failure> {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("list");
        std::fs::write(&file, text).expect("write");
        let names = Names::read(&file, &OriginUri::parse(uri).expect("uri"))?;
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
    fn what_lies_elsewhere_or_is_no_name_is_refused_with_its_line() {
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
