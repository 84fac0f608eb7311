//! Files of cases, TOML or JSON, with one case or several (`docs/SIMULATE.md`).

use crate::Case;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Longest file of cases, in bytes.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

/// The reason why a case or a trace cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum BadCase {
    /// The file cannot be read.
    #[error("{}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: std::io::Error,
    },
    /// A file cannot be written.
    #[error("{}: {why}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: std::io::Error,
    },
    /// A file is not a trace, or its calls now give other results.
    #[error("{}: {why}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// The fault of the trace.
        why: fletch_core::order::sweep::trace::BadTrace,
    },
    /// Several runs were to be recorded, or one without a sweep.
    #[error("--record writes one trace: give exactly one case and only --arm fletch")]
    Record,
    /// The file is too long.
    #[error("{} has {bytes} bytes: too long for a file of cases (64 MiB) or a trace (4 GiB)", path.display())]
    Long {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        bytes: u64,
    },
    /// The file cannot be parsed as a case.
    #[error("{} is not a case: {why}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        why: String,
    },
    /// The case is impossible.
    #[error("case {case:?}: {}", faults.join("; "))]
    Faults {
        /// The case's name.
        case: String,
        /// All its faults.
        faults: Vec<String>,
    },
    /// A `--set` names no constant, or has no valid number.
    #[error("--set {set:?}: {why}")]
    Param {
        /// The argument of `--set`.
        set: String,
        /// The fault.
        why: String,
    },
}

/// Several cases under the key `case`, as TOML must write them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Several {
    case: Vec<Case>,
}

/// Reads the cases of a file: TOML where its name ends in `.toml`, else JSON. One case, a list of
/// them (JSON), or a list under the key `case`.
///
/// # Errors
/// [`BadCase::Read`], [`BadCase::Long`], [`BadCase::Parse`]. Whether a case is possible is for
/// [`Case::faults`].
pub fn read(path: &Path) -> Result<Vec<Case>, BadCase> {
    let unread = |why| BadCase::Read { path: path.to_owned(), why };
    let bytes = std::fs::metadata(path).map_err(unread)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(BadCase::Long { path: path.to_owned(), bytes });
    }
    let text = std::fs::read_to_string(path).map_err(unread)?;
    let cases = if path.extension().is_some_and(|x| x == "toml") { toml(&text) } else { json(&text) };
    cases.map_err(|why| BadCase::Parse { path: path.to_owned(), why })
}

fn toml(text: &str) -> Result<Vec<Case>, String> {
    let several = text.parse::<toml::Table>().map_err(|e| e.to_string())?.contains_key("case");
    if several {
        toml::from_str::<Several>(text).map(|s| s.case).map_err(|e| e.to_string())
    } else {
        toml::from_str(text).map(|c| vec![c]).map_err(|e| e.to_string())
    }
}

fn json(text: &str) -> Result<Vec<Case>, String> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    // From the text, not the value, so that an error says its line.
    let cases = if value.is_array() {
        serde_json::from_str(text)
    } else if value.get("case").is_some() {
        serde_json::from_str::<Several>(text).map(|s| s.case)
    } else {
        serde_json::from_str(text).map(|c| vec![c])
    };
    cases.map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOML: &str = r#"
        name = "two"
        units = { count = 10, samples = 4 }
        cache = 0.2
        warm = 80.0
        end = 320.0
        [[jobs]]
        rate = 1.0
        [[jobs]]
        rate = 2.0
        start = 3.5
        pauses = [[100.0, 110.0]]
        reader = "strict"
    "#;

    #[test]
    fn toml_and_json_say_the_same() {
        let cases = toml(TOML).expect("a case");
        assert_eq!((cases.len(), &cases[0].units[..]), (1, &[4; 10][..]));
        assert_eq!((cases[0].seed, cases[0].jobs[1].pauses[0]), (1, (100.0, 110.0)));
        assert!(cases[0].faults().is_empty());
        let text = serde_json::to_string(&cases[0]).expect("json");
        assert_eq!(json(&text).expect("a case"), cases);
        assert_eq!(json(&format!("[{text}, {text}]")).expect("cases").len(), 2);
        assert_eq!(json(&format!("{{\"case\": [{text}]}}")).expect("cases"), cases);
        let list = TOML.replace("{ count = 10, samples = 4 }", "[4, 4, 4]");
        assert_eq!(toml(&list).expect("a case")[0].units, [4; 3]);
        assert_eq!(toml("case = []").expect("none").len(), 0);
    }

    /// The example of docs/SIMULATE.md is a case with every key.
    #[test]
    fn the_page_shows_a_case() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/SIMULATE.md");
        let page = std::fs::read_to_string(page).expect("docs/SIMULATE.md");
        let shown = page.split("```toml\n").nth(1).and_then(|x| x.split("```").next()).expect("an example");
        let cases = toml(shown).expect("a case");
        assert_eq!((cases.len(), cases[0].faults()), (1, Vec::new()));
        let keys = serde_json::to_value(&cases[0]).expect("json");
        for key in keys.as_object().expect("an object").keys().filter(|k| *k != "bound") {
            assert!(shown.contains(key.as_str()), "docs/SIMULATE.md does not show {key}");
        }
    }

    #[test]
    fn what_is_no_case_says_where() {
        let odd = toml(&TOML.replace("cache", "cash")).expect_err("unknown");
        assert!(odd.contains("cash") && odd.contains("line"), "{odd}");
        assert!(toml("name = ").is_err() && json("{").is_err() && json("[1]").is_err());
        assert!(toml(&TOML.replace("count", "number")).is_err());
        // Their number alone would take 8 GiB.
        for many in ["2147483648, samples = 1", "4294967295, samples = 0"] {
            let many = toml(&TOML.replace("10, samples = 4", many)).expect_err("too many");
            assert!(many.contains("2^24 units"), "{many}");
        }
        assert!(matches!(read(Path::new("/nowhere/at/all.toml")), Err(BadCase::Read { .. })));
    }
}
