//! The `--list` file: the names of the objects of a dataset whose server has no listing.
//!
//! A plain HTTP server needs such a list. Each line is a path below the dataset, or a URI below the dataset's
//! URI. The list may be in any order. Empty lines are skipped, and a name that comes twice counts once.

use crate::failure::Failure;
use fletch_origin::OriginUri;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

/// The longest list, in bytes of names. The list is in memory.
const LIST_BYTES_MAX: u64 = 1 << 30;
/// The longest line, in bytes: a URI of the longest path with every byte encoded.
const LINE_BYTES_MAX: usize = 16 << 10;

/// The names of a `--list` file, sorted by their bytes, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameList(Arc<Vec<Box<str>>>);

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

    /// Returns the names, sorted by their bytes, each once.
    #[must_use]
    pub fn names(&self) -> &[Box<str>] {
        &self.0
    }

    /// Whether any name lies below the directory `path`.
    #[must_use]
    pub fn has_below(&self, path: &str) -> bool {
        let dir = format!("{path}/");
        let at = self.0.partition_point(|name| **name < *dir);
        self.0.get(at).is_some_and(|name| name.starts_with(&dir))
    }
}

/// Returns the path below `uri` that a line names.
fn relative(text: &str, uri: &OriginUri) -> Result<String, String> {
    let is_uri = text
        .split_once("://")
        .is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric()));
    let object = match is_uri {
        true => {
            let object = OriginUri::parse(text).map_err(|e| e.to_string())?;
            // A list that was made for the plain URI serves the bucket of that name at any store.
            let store = object.store().or(uri.store());
            object.at_store(store).map_err(|e| e.to_string())?
        }
        false => uri.join(text).map_err(|e| e.to_string())?,
    };
    let below = object.below(uri).filter(|rel| !rel.is_empty());
    below.ok_or_else(|| format!("{object} is not below {uri}"))
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
        assert_eq!(read(b"s3://bucket/p/a b", "s3://bucket~store/p").expect("names"), ["a b"]);
        assert!(read(b"s3://bucket~other/p/a", "s3://bucket~store/p").is_err());
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
