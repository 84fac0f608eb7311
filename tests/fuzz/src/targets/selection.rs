//! Selections of samples: Parquet and CSV files that a training program names.

use super::golden_bytes;
use crate::{plant, scratch};
use fletch_api::WeightOf;
use fletch_client::selection::{Columns, Selection};

pub fn seeds() -> Vec<Vec<u8>> {
    let csv = ["key\na/1\nb/2\n", "number,weight\n1,0.5\n7,2\n", "key,weight\n\"a,\"\"b\",1e3\nc,0\n"];
    let made = csv.into_iter().map(|t| t.as_bytes().to_vec());
    made.chain([golden_bytes("tables/entries.parquet"), golden_bytes("tables/placement.parquet")]).collect()
}

/// A selection has a sample, and with weights as many weights as samples, each finite and not negative.
pub fn run(input: &[u8]) -> bool {
    let path = scratch::written("selection", input);
    let column = |name: &str| Some(name.to_owned());
    let columns = [
        Columns::default(),
        Columns { weights: column("weight"), ..Columns::default() },
        Columns { keys: column("path"), weights: column("size"), ..Columns::default() },
        Columns { numbers: column("ordinal"), ..Columns::default() },
    ];
    let mut accepted = false;
    for columns in &columns {
        let Ok(selection) = Selection::read(&path, columns) else { continue };
        accepted = true;
        assert!(!selection.is_empty());
        assert_eq!(selection.weights.is_some(), columns.weights.is_some());
        let weights = selection.weights.clone().unwrap_or_default();
        assert!(weights.iter().all(|w| w.is_finite() && *w >= 0.0), "{weights:?}");
        assert!(weights.is_empty() || weights.len() == selection.len());
        plant::bug(matches!(&selection.of, WeightOf::Keys(k) if k.iter().any(|k| k.len() > 40)));
        drop(selection.base(None));
    }
    accepted
}
