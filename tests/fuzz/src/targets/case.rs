//! Files of cases for the simulator, TOML or JSON.

use crate::{plant, scratch};

/// Cases with more samples are read, and not checked: the check looks at each sample.
const SAMPLES_MAX: usize = 1 << 16;

const TOML: &str = "name = \"two\"\nunits = { count = 10, samples = 4 }\ncache = 0.2\nwarm = 80.0\n\
    end = 320.0\n[origin]\nbandwidth = 9.0\nlatency = 0.5\n[[servers]]\ngone = [[1.0, 2.0]]\n\
    [[jobs]]\nrate = 1.0\nsubset = { part = 0.1, whole_units = false, seed = 1 }\n\
    [[jobs]]\nrate = 2.0\nstart = 3.5\npauses = [[100.0, 110.0]]\nreader = \"strict\"\n";
const JSON: &str =
    r#"{"case":[{"name":"one","units":[4,4,1],"cache":1,"warm":1,"end":9,"jobs":[{"rate":1}]}]}"#;

pub fn seeds() -> Vec<Vec<u8>> {
    vec![[b"t", TOML.as_bytes()].concat(), [b"j", JSON.as_bytes()].concat()]
}

/// The first byte says which form the rest has. A file gives the same cases and the same faults each time.
pub fn run(input: &[u8]) -> bool {
    let Some((form, text)) = input.split_first() else { return false };
    let path = scratch::written(if *form == b't' { "case.toml" } else { "case.json" }, text);
    let read = || {
        let cases = fletch_sim::file::read(&path).map_err(|e| e.to_string())?;
        let small = cases.into_iter().filter(|case| case.units.len() <= SAMPLES_MAX);
        let small = small.filter(|case| case.samples() <= SAMPLES_MAX);
        Ok(small.map(|case| (format!("{case:?}"), case.faults())).collect::<Vec<_>>())
    };
    let cases: Result<_, String> = read();
    assert_eq!(cases, read(), "the same file gives other cases");
    let Ok(cases) = cases else { return false };
    plant::bug(cases.iter().any(|(_, faults)| faults.len() > 2));
    !cases.is_empty()
}
