//! What is absent when a version cannot be found, and the next command: a wrong name, a wrong tag, forgotten
//! tables, and a dataset that is not indexed yet are four different sentences.

use super::Context;
use crate::failure::Failure;
use crate::run::written::{self, WrittenTables};
use crate::target::Select;
use fletch_api::{Code, Dataset};
use fletch_client::{Client, ClientError};
use fletch_core::DatasetName;

/// The most names that an error lists.
const NAMED_MAX: usize = 8;
/// How alike a name must be to be suggested: 1 is equal.
const ALIKE: f64 = 0.7;

/// Returns the failure of a name that the server does not have.
pub fn unregistered(name: &DatasetName, datasets: &[Dataset], server: &str) -> Failure {
    let alike = |d: &&Dataset| strsim::jaro_winkler(d.name.as_str(), name.as_str());
    let nearest = datasets.iter().max_by(|a, b| alike(a).total_cmp(&alike(b)));
    let what = format!("no dataset {name} is registered at {server}");
    match nearest {
        Some(near) if alike(&near) >= ALIKE => Failure::new(what).hint(format!(
            "did you mean {}? `fletch register {name} SOURCE` registers another one",
            near.name
        )),
        Some(_) => {
            let mut names: Vec<&str> = datasets.iter().map(|d| d.name.as_str()).take(NAMED_MAX).collect();
            if datasets.len() > NAMED_MAX {
                names.push("…");
            }
            Failure::new(what).hint(format!(
                "registered: {}; `fletch register {name} SOURCE` registers another one",
                names.join(", ")
            ))
        }
        None => Failure::new(what)
            .hint(format!("nothing is registered there yet: run `fletch register {name} SOURCE`")),
    }
}

/// Returns the failure of a dataset whose tables, at `tables`, have no version.
///
/// `source` is the dataset as the user wrote it; `tables` where its tables should be, if not at the dataset.
/// `places` are where this account wrote its tables. `register` is the command that takes `--tables`; without
/// it the user gives the place itself.
pub fn not_indexed(
    source: &str,
    tables: Option<&str>,
    places: &[WrittenTables],
    register: Option<&str>,
) -> Failure {
    let elsewhere = |p: &WrittenTables| tables != Some(p.tables.as_str());
    let other: Vec<_> = places.iter().filter(|p| elsewhere(p)).cloned().collect();
    match (written::best(&other), tables) {
        (Some(place), Some(tables)) => Failure::new(format!(
            "there are no tables of {source} at {tables}, but this account wrote them to {}",
            place.tables
        ))
        .hint(match register {
            Some(register) => format!("run `{register} --tables {}`", place.tables),
            None => format!("give that place: `fletch ls {}`", place.tables),
        }),
        (Some(place), None) => {
            Failure::new(format!("{source} is indexed, but its tables at {} are gone", place.tables))
                .hint(format!("run `fletch index {source} --tables {}` again", place.tables))
        }
        (None, Some(tables)) => Failure::new(format!("{source} is not indexed yet: {tables} has no tables"))
            .hint(format!("run `fletch index {source} --tables {tables}`, then this command again")),
        (None, None) => Failure::new(format!("{source} is not indexed yet"))
            .hint(format!("run `fletch index {source}`, then this command again")),
    }
}

/// Returns the failure of a version that the server did not find.
pub async fn at_server(
    ctx: &Context,
    client: &Client,
    name: &DatasetName,
    select: &Select,
    error: ClientError,
) -> Failure {
    let code = error.code();
    if !matches!(code, Some(Code::NotFound | Code::NotIndexed)) {
        return error.into();
    }
    // The server's own words serve where it does not answer these questions.
    let Ok(datasets) = client.datasets().await else { return error.into() };
    let Some(dataset) = datasets.iter().find(|d| d.name == *name) else {
        return unregistered(name, &datasets, &client.servers().to_string());
    };
    if code == Some(Code::NotIndexed) {
        let places = ctx.registered_uri(&dataset.uri).map(|uri| ctx.written(&uri)).unwrap_or_default();
        let tables = (dataset.tables != dataset.uri).then_some(dataset.tables.as_str());
        // Tables that this account wrote elsewhere were forgotten at the registration.
        let tables = tables.or_else(|| (!places.is_empty()).then_some(dataset.tables.as_str()));
        let register = format!("fletch register {name} {}", dataset.uri);
        return not_indexed(&dataset.uri, tables, &places, Some(&register));
    }
    match select {
        Select::Tag(_) => error.into(),
        Select::Root(root) => Failure::new(format!("dataset {name} has no version {root}"))
            .hint(format!("`fletch tag {}` lists the tagged versions", dataset.tables)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::manifest::LayoutKind;
    use fletch_core::{Hash, LayoutId, Root};

    fn dataset(name: &str) -> Dataset {
        let name = DatasetName::new(name).expect("name");
        Dataset { name, uri: "/d".into(), tables: "/d".into(), registered_ns: 0 }
    }

    #[test]
    fn a_wrong_name_gets_the_nearest_or_all_names() {
        let name = DatasetName::new("imagnet").expect("name");
        let said = |datasets: &[Dataset]| unregistered(&name, datasets, "unix:/s").to_string();
        assert!(said(&[]).contains("nothing is registered there yet"), "{}", said(&[]));
        let near = said(&[dataset("audio"), dataset("imagenet")]);
        assert!(near.contains("did you mean imagenet?"), "{near}");
        let far = said(&[dataset("audio"), dataset("text")]);
        assert!(far.contains("registered: audio, text") && far.contains("fletch register imagnet"), "{far}");
    }

    #[test]
    fn forgotten_tables_and_a_dataset_that_is_not_indexed_are_two_sentences() {
        let (root, layout) = (Root(Hash::of(b"r")), LayoutId(Hash::of(b"l")));
        let kind = LayoutKind::Index;
        let place = WrittenTables { tables: "/there".into(), root, layout, kind, at_ns: 1 };
        let said = |tables, places: &[WrittenTables]| {
            not_indexed("data", tables, places, Some("fletch register d data")).to_string()
        };
        let forgotten = said(Some("/here"), std::slice::from_ref(&place));
        assert!(forgotten.contains("wrote them to /there"), "{forgotten}");
        assert!(forgotten.contains("fletch register d data --tables /there"), "{forgotten}");
        let never = said(None, &[]);
        assert!(never.contains("not indexed yet") && never.contains("fletch index data"), "{never}");
        let there = said(Some("/here"), &[]);
        assert!(there.contains("fletch index data --tables /here"), "{there}");
        let gone = said(None, &[place]);
        assert!(gone.contains("are gone") && gone.contains("--tables /there"), "{gone}");
    }
}
