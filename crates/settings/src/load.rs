//! Reads one settings file and reports every fault of its syntax, keys and types at once.

use fletch_core::Kind;
use serde::de::DeserializeOwned;
use std::fmt;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue, Deserializer};

/// The longest settings file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// One fault of a settings file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The file's name, as the caller gave it.
    pub file: String,
    /// The fault's line, from 1; `None` for a fault without a line, such as a missing value.
    pub line: Option<usize>,
    /// The fault and, where it is known, the correction.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file, self.message),
            None => write!(f, "{}: {}", self.file, self.message),
        }
    }
}

/// The settings could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("{file}: {message}")]
    Read {
        /// The file's name, as the caller gave it.
        file: String,
        /// The system's error message.
        message: String,
        /// Whether the file does not exist.
        missing: bool,
    },
    /// The file has faults. They are in the order of the file.
    #[error("{}", .0.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n"))]
    Faults(Vec<Fault>),
}

impl SettingsError {
    /// Returns the kind of the error, which says who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            SettingsError::Read { missing: true, .. } => Kind::NotFound,
            _ => Kind::Invalid,
        }
    }
}

/// Reads the TOML file at `path` into `T`. See [`parse`].
///
/// # Errors
/// [`SettingsError::Read`] if the file cannot be read or is longer than 1 MiB, else as [`parse`].
pub fn load<T: DeserializeOwned>(path: &Path, keys: &[&str]) -> Result<T, SettingsError> {
    let file = path.display().to_string();
    let read = || -> std::io::Result<String> {
        let mut text = String::new();
        std::fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(std::io::Error::other("the file is longer than 1 MiB, the limit of a settings file"));
        }
        Ok(text)
    };
    let text = read().map_err(|e| SettingsError::Read {
        file: file.clone(),
        message: e.to_string(),
        missing: e.kind() == std::io::ErrorKind::NotFound,
    })?;
    parse(&text, &file, keys)
}

/// Parses TOML `text` into `T`. Errors call the text `name`.
///
/// `keys` are all known keys, with dots (`"cache.size"`, `"origin.*.prefix"`). `*` stands for the elements of
/// an array of tables, or for the free names of a table. The function does not check the keys below a known
/// key if no known key is longer.
///
/// # Errors [`SettingsError::Faults`] with every syntax error; or, if the syntax is right, with every unknown
/// key and every value of a wrong type.
pub fn parse<T: DeserializeOwned>(text: &str, name: &str, keys: &[&str]) -> Result<T, SettingsError> {
    let (mut table, syntax) = DeTable::parse_recoverable(text);
    let mut faults: Vec<(Option<usize>, String)> =
        syntax.iter().map(|e| (e.span().map(|s| s.start), e.message().to_owned())).collect();
    if faults.is_empty() {
        let known = Keys::new(keys);
        known.check(table.get_mut(), &mut Vec::new(), &mut faults);
        if let Some(value) = deserialize(table, &mut faults) {
            return Ok(value);
        }
    }
    faults.sort();
    let line = |at: usize| 1 + text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count();
    Err(SettingsError::Faults(
        faults
            .into_iter()
            .map(|(at, message)| Fault { file: name.to_owned(), line: at.map(line), message })
            .collect(),
    ))
}

/// Deserializes the table. Returns `None` if `faults` is not empty at the end.
///
/// On an error it removes the faulty value and tries again, so that one run finds all faulty values. Each
/// turn removes a value, so the loop ends.
fn deserialize<T: DeserializeOwned>(
    mut table: Spanned<DeTable<'_>>,
    faults: &mut Vec<(Option<usize>, String)>,
) -> Option<T> {
    let mut removed: Vec<String> = Vec::new();
    loop {
        let error = match T::deserialize(Deserializer::from(table.clone())) {
            Ok(value) => return faults.is_empty().then_some(value),
            Err(error) => error,
        };
        let message = error.message().trim_end();
        let missing = message.starts_with("missing field");
        let path = error.span().and_then(|span| remove_at(table.get_mut(), &span, missing, &mut Vec::new()));
        // A required value that this loop removed is not a second fault.
        if !removed.iter().any(|key| message == format!("missing field `{key}`")) {
            let at = error.span().map(|s| s.start);
            let key = path.as_ref().map(|path| format!("{:?}: ", path.join("."))).unwrap_or_default();
            faults.push((at, key + message));
        }
        removed.push(path?.pop()?);
    }
}

/// Removes the innermost value whose span holds `span`. Returns the value's path.
///
/// With `whole` it removes the table whose span is `span`, in which a value is missing.
fn remove_at(
    table: &mut DeTable<'_>,
    span: &Range<usize>,
    whole: bool,
    path: &mut Vec<String>,
) -> Option<Vec<String>> {
    let holds = |outer: Range<usize>| outer.start <= span.start && span.end <= outer.end;
    let mut hit = None;
    for (key, value) in table.iter_mut() {
        path.push(key.get_ref().to_string());
        let value_span = value.span();
        match value.get_mut() {
            // The span of a table is its header's, not its body's, so the search enters every table.
            DeValue::Table(inner) => {
                if let Some(path) = remove_at(inner, span, whole, path) {
                    return Some(path);
                }
                if value_span == *span {
                    hit = Some((key.clone(), path.clone()));
                }
            }
            DeValue::Array(items) => {
                let mut lacking = None;
                for (i, item) in items.iter_mut().enumerate() {
                    let item_span = item.span();
                    if let DeValue::Table(inner) = item.get_mut() {
                        if let Some(path) = remove_at(inner, span, whole, path) {
                            return Some(path);
                        }
                        if whole && item_span == *span {
                            lacking = Some(i);
                        }
                    }
                }
                if let Some(i) = lacking {
                    let kept = std::mem::replace(items, DeArray::new())
                        .into_iter()
                        .enumerate()
                        .filter(|(at, _)| *at != i);
                    *items = kept.map(|(_, item)| item).collect();
                    return Some(path.clone());
                }
                if !whole && holds(value_span) {
                    hit = Some((key.clone(), path.clone()));
                }
            }
            _ if !whole && (holds(value_span) || holds(key.span())) => {
                hit = Some((key.clone(), path.clone()))
            }
            _ => {}
        }
        path.pop();
    }
    let (key, path) = hit?;
    table.remove(&key);
    Some(path)
}

/// The known keys, split at their dots.
struct Keys<'a>(Vec<Vec<&'a str>>);

impl<'a> Keys<'a> {
    fn new(keys: &[&'a str]) -> Self {
        Keys(keys.iter().map(|k| k.split('.').collect()).collect())
    }

    /// Returns whether a known key begins with `path`, and whether a known key is longer than `path`.
    fn status(&self, path: &[String]) -> (bool, bool) {
        let begins = |key: &&Vec<&str>| {
            key.len() >= path.len() && key.iter().zip(path).all(|(k, p)| *k == "*" || k == p)
        };
        let mut known = false;
        let mut longer = false;
        for key in self.0.iter().filter(begins) {
            known = true;
            longer |= key.len() > path.len();
        }
        (known, longer)
    }

    /// Removes every unknown key at or below `path`, and adds a fault for each.
    fn check(
        &self,
        table: &mut DeTable<'_>,
        path: &mut Vec<String>,
        faults: &mut Vec<(Option<usize>, String)>,
    ) {
        let mut unknown = Vec::new();
        for (key, value) in table.iter_mut() {
            path.push(key.get_ref().to_string());
            match self.status(path) {
                (false, _) => {
                    faults.push((Some(key.span().start), self.unknown(path)));
                    unknown.push(key.clone());
                }
                (true, true) => match value.get_mut() {
                    DeValue::Table(inner) => self.check(inner, path, faults),
                    DeValue::Array(items) => {
                        path.push("*".to_owned());
                        for item in items.iter_mut() {
                            if let DeValue::Table(inner) = item.get_mut() {
                                self.check(inner, path, faults);
                            }
                        }
                        path.pop();
                    }
                    _ => {}
                },
                (true, false) => {}
            }
            path.pop();
        }
        for key in unknown {
            table.remove(&key);
        }
    }

    fn unknown(&self, path: &[String]) -> String {
        let plain = |key: &[&str]| key.iter().filter(|c| **c != "*").copied().collect::<Vec<_>>().join(".");
        let written = plain(&path.iter().map(String::as_str).collect::<Vec<_>>());
        let nearest = self
            .0
            .iter()
            .map(|key| plain(key))
            .min_by_key(|key| (strsim::damerau_levenshtein(key, &written), key.clone()));
        match nearest {
            Some(key) => format!("unknown key {written:?}; the nearest known key is {key:?}"),
            None => format!("unknown key {written:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ByteSize, Span};
    use serde::Deserialize;

    const KEYS: &[&str] =
        &["cache.size", "cache.dir", "io.timeout", "origin.*.prefix", "origin.*.allow_http"];

    #[derive(Debug, Deserialize, PartialEq)]
    struct Cache {
        size: Option<ByteSize>,
        dir: Option<String>,
    }
    #[derive(Debug, Deserialize, PartialEq)]
    struct Io {
        timeout: Span,
    }
    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Origin {
        prefix: String,
        #[serde(default)]
        allow_http: bool,
    }
    #[derive(Debug, Deserialize, PartialEq)]
    struct All {
        cache: Option<Cache>,
        io: Option<Io>,
        #[serde(default)]
        origin: Vec<Origin>,
    }

    fn faults(text: &str) -> Vec<(Option<usize>, String)> {
        match parse::<All>(text, "f.toml", KEYS) {
            Err(SettingsError::Faults(faults)) => faults.into_iter().map(|f| (f.line, f.message)).collect(),
            other => panic!("no faults but {other:?}"),
        }
    }

    #[test]
    fn a_right_file_is_read() {
        let text = "io.timeout = \"30s\"\n[cache]\nsize = \"2GiB\"\n[[origin]]\nprefix = \"/data\"\n";
        let all: All = parse(text, "f.toml", KEYS).expect("right");
        assert_eq!(all.cache.and_then(|c| c.size), Some(ByteSize(2 << 30)));
        assert_eq!(all.io.map(|i| i.timeout.0.as_secs()), Some(30));
        assert_eq!(all.origin, [Origin { prefix: "/data".into(), allow_http: false }]);
    }

    #[test]
    fn every_unknown_key_is_named_with_its_line_and_the_nearest_key() {
        let got = faults(
            "[cache]\nsise = 1\ndir = \"d\"\n[[origin]]\nprefix = \"a\"\n\
             [[origin]]\nprefx = \"b\"\nprefix = \"c\"\n[oi]\nx = 1\n",
        );
        assert_eq!(
            got,
            [
                (Some(2), "unknown key \"cache.sise\"; the nearest known key is \"cache.size\"".to_owned()),
                (
                    Some(7),
                    "unknown key \"origin.prefx\"; the nearest known key is \"origin.prefix\"".to_owned()
                ),
                (Some(9), "unknown key \"oi\"; the nearest known key is \"cache.dir\"".to_owned()),
            ]
        );
    }

    #[test]
    fn unknown_keys_and_wrong_types_come_together() {
        let got = faults("[cache]\nsize = \"lots\"\ndirr = 1\n[io]\ntimeout = 30\n[[origin]]\nprefix = 7\n");
        assert_eq!(
            got.iter().map(|f| f.0).collect::<Vec<_>>(),
            [Some(2), Some(3), Some(5), Some(7)],
            "{got:?}"
        );
        assert!(got[0].1.starts_with("\"cache.size\": \"lots\" is not a size"), "{got:?}");
        assert!(got[2].1.contains("\"io.timeout\"") && got[2].1.contains("duration"), "{got:?}");
        assert!(got[3].1.contains("\"origin.prefix\""), "{got:?}");
    }

    #[test]
    fn syntax_missing_values_and_wrong_shapes_are_faults_too() {
        assert_eq!(faults("[cache]\nsize = \n")[0].0, Some(2));
        assert!(faults("[io]\n")[0].1.contains("missing field `timeout`"));
        assert_eq!(
            faults("cache = 3\n"),
            [(Some(1), "\"cache\": invalid type: integer `3`, expected struct Cache".to_owned())]
        );
        assert_eq!(faults("[origin]\nprefix = \"x\"\n").len(), 1);
        let got =
            faults("[[origin]]\nallow_http = 1\n[[origin]]\nallow_http = true\n[io]\ntimeout = \"x\"\n");
        assert_eq!(
            got.iter().map(|f| f.0).collect::<Vec<_>>(),
            [Some(1), Some(2), Some(3), Some(6)],
            "{got:?}"
        );
    }

    #[test]
    fn files_that_cannot_be_read_say_so() {
        let dir = tempfile::tempdir().expect("tempdir");
        let missing = dir.path().join("none.toml");
        let error = load::<All>(&missing, KEYS).expect_err("missing");
        assert_eq!(error.kind(), Kind::NotFound);
        assert!(error.to_string().starts_with(&missing.display().to_string()));

        let path = dir.path().join("f.toml");
        std::fs::write(&path, "[cache]\nsiz = 1\n").expect("write");
        let error = load::<All>(&path, KEYS).expect_err("unknown key");
        assert_eq!(error.kind(), Kind::Invalid);
        assert_eq!(
            error.to_string(),
            format!(
                "{}:2: unknown key \"cache.siz\"; the nearest known key is \"cache.size\"",
                path.display()
            )
        );

        std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).expect("write");
        assert!(load::<All>(&path, KEYS).expect_err("too long").to_string().contains("1 MiB"));
    }
}
