//! Where a command writes the tables of a dataset when it is not told: never into the dataset.
//!
//! It is the place that the server names (`publish.uri`, or the state directory of a server on this machine).
//! Without a server, it is the state directory of the user's own server, which `fletch mount` starts.

use crate::failure::Failure;
use fletch_core::Hash;
use fletch_origin::OriginUri;

/// The most characters of a dataset's name in the name of its directory.
const WORD_MAX: usize = 40;

/// Returns the name of a dataset's directory: a part of its URI for people, and a hash of all of it.
#[must_use]
pub fn directory_of(uri: &OriginUri) -> String {
    let text = uri.to_string();
    let word: String = name_in(uri).chars().take(WORD_MAX).collect();
    format!("{word}-{}", &Hash::of(text.as_bytes()).to_string()[..8])
}

/// Returns the name that a URI suggests: its last component, else the bucket. Always a valid name.
///
/// If the URI names its store, the name does, too: `photos-at-127.0.0.1-9000`.
#[must_use]
pub fn name_in(uri: &OriginUri) -> String {
    let text = match (uri.as_local(), uri.store()) {
        (Some(dir), _) => dir.display().to_string(),
        (None, None) => uri.to_string(),
        (None, Some(store)) => format!("{}-at-{store}", uri.without_store()),
    };
    let last = text.trim_end_matches('/').rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let word: String = last.chars().map(plain).take(100).collect();
    let word = word.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    if word.is_empty() { "dataset".to_owned() } else { word.to_owned() }
}

/// Returns the place of a dataset's tables below the place that a server named.
///
/// # Errors
/// The place is no URI.
pub fn below(place: &str, dataset: &OriginUri) -> Result<OriginUri, Failure> {
    let base = OriginUri::parse(place).map_err(|e| Failure::new(e.to_string()))?;
    base.join(&directory_of(dataset)).map_err(|e| Failure::new(e.to_string()))
}

/// Returns the failure of a server elsewhere that names no place.
#[must_use]
pub fn unknown(server: &str) -> Failure {
    Failure::usage(format!("where do the tables go? The server at {server} names no place for them")).hint(
        "name a place that you and the server can read with --tables URI, or set publish.uri at the server",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dataset_has_a_directory_with_a_name_for_people() {
        let uri = |text: &str| OriginUri::parse(text).expect("uri");
        for (text, name) in [
            ("s3://bucket/sets/photos", "photos"),
            ("s3://bucket", "bucket"),
            ("s3://bucket~127.0.0.1:9000", "bucket-at-127.0.0.1-9000"),
            ("s3://bucket~minio.example/sets/photos", "photos-at-minio.example"),
            ("/data/My Photos", "My-Photos"),
            ("/data/.hidden", "hidden"),
            ("/data/ü", "dataset"),
            ("/", "dataset"),
        ] {
            assert_eq!(name_in(&uri(text)), name, "{text}");
            fletch_core::DatasetName::new(name).expect("a name");
        }
        let (a, b) = (directory_of(&uri("s3://one/photos")), directory_of(&uri("s3://two/photos")));
        assert!(a != b && a.starts_with("photos-"), "{a} {b}");
        let other = directory_of(&uri("s3://one~store/photos"));
        assert!(other != a && other.starts_with("photos-at-store-"), "{other}");
        let place = below("/state/tables", &uri("s3://one/photos")).expect("a place");
        assert_eq!(place.as_local(), Some(std::path::Path::new("/state/tables").join(a).as_path()));
        assert!(unknown("http://far").to_string().contains("publish.uri"));
    }
}
