//! Listings end whole, or with an error: whatever a store says of its pages.

use crate::{limits, uri};
use fletch_origin::{Credentials, OriginConfig, OriginError, OriginLimits, Origins};
use fletch_testkit::scripted::{ScriptedServer, answer};
use futures::TryStreamExt as _;

/// The keys of the fake store.
fn keys() -> Vec<String> {
    (0..25).map(|i| format!("p/{i:02}")).collect()
}

/// The value of a query key in the head of a request.
fn query(head: &str, key: &str) -> Option<String> {
    let line = head.lines().next()?.split(' ').nth(1)?.split_once('?')?.1.to_owned();
    let pairs = url::form_urlencoded::parse(line.as_bytes());
    pairs.into_iter().find(|(name, _)| name == key).map(|(_, value)| value.into_owned())
}

/// Returns a page of up to ten of `keys` after `after`, with `more` at its end if keys follow.
fn page(after: Option<&str>, more: impl Fn(&str) -> String, last: &str) -> Vec<u8> {
    let left: Vec<String> =
        keys().into_iter().filter(|key| after.is_none_or(|after| key.as_str() > after)).collect();
    let shown = &left[..left.len().min(10)];
    let contents: String =
        shown.iter().map(|key| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>")).collect();
    let end = match shown.last() {
        Some(key) if left.len() > 10 => more(key),
        _ => last.to_owned(),
    };
    let body = format!("<ListBucketResult>{contents}{end}</ListBucketResult>");
    answer("200 OK", &[("Content-Type", "application/xml")], body.as_bytes())
}

async fn listed(server: &ScriptedServer, credentials: Credentials) -> Result<Vec<String>, OriginError> {
    let config = OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(server.endpoint()),
        credentials: Some(credentials),
        region: Some("eu-west-1".to_owned()),
        allow_http: true,
        ..OriginConfig::default()
    };
    let limits = OriginLimits { attempts_max: 1, ..limits(5_000) };
    let origins = Origins::new(vec![config], limits).expect("right");
    let origin = origins.open(&uri("s3://bucket")).expect("open");
    origin.list("p").map_ok(|object| object.path).try_collect().await
}

const TRUNCATED: &str = "<IsTruncated>true</IsTruncated>";

#[tokio::test]
async fn a_cut_off_page_without_a_token_is_followed_by_the_keys_after_it() {
    // Stores of the first version of the API read `marker`; others, which forget the token, `start-after`.
    for parameter in ["marker", "start-after"] {
        let server = ScriptedServer::start(move |head| {
            page(query(head, parameter).as_deref(), |_| TRUNCATED.to_owned(), "")
        });
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("credentials");
        std::fs::write(&file, "aws_access_key_id = AKID\naws_secret_access_key = secret\n").expect("written");
        for credentials in [Credentials::Anonymous, Credentials::File(file)] {
            let is_signed = credentials != Credentials::Anonymous;
            let before = server.heads().len();
            assert_eq!(listed(&server, credentials).await, Ok(keys()), "{parameter}");
            let heads = server.heads().split_off(before);
            assert_eq!(heads.len(), 3, "{parameter}");
            assert_eq!(query(&heads[2], "marker").as_deref(), Some("p/19"), "{parameter}");
            for head in heads {
                let authorization = head.lines().find(|line| line.starts_with("authorization:"));
                let scope =
                    authorization.is_some_and(|line| line.contains("AKID/") && line.contains("/eu-west-1/"));
                assert_eq!(scope, is_signed, "{head}");
            }
        }
    }
}

#[tokio::test]
async fn what_a_page_says_about_its_end_is_read_as_stores_mean_it() {
    let token = |key: &str| format!("{TRUNCATED}<NextContinuationToken>{key}</NextContinuationToken>");
    let ends = [
        "<IsTruncated>false</IsTruncated>",
        "<IsTruncated>false</IsTruncated><NextContinuationToken>p/00</NextContinuationToken>",
        "<NextContinuationToken></NextContinuationToken>",
        "<IsTruncated>false</IsTruncated><NextContinuationToken/>",
        "",
    ];
    for end in ends {
        let server =
            ScriptedServer::start(move |head| page(query(head, "continuation-token").as_deref(), token, end));
        assert_eq!(listed(&server, Credentials::Anonymous).await, Ok(keys()), "{end}");
    }
    // The next page begins with the last key of the one before.
    let server = ScriptedServer::start(move |head| match query(head, "continuation-token").as_deref() {
        Some("p/09") => page(Some("p/08"), token, ""),
        after => page(after, token, ""),
    });
    assert_eq!(listed(&server, Credentials::Anonymous).await, Ok(keys()));
}

#[tokio::test]
async fn a_listing_without_an_end_is_an_error() {
    let empty = |token: String| {
        let body = format!(
            "<ListBucketResult>{TRUNCATED}<NextContinuationToken>{token}</NextContinuationToken>\
             </ListBucketResult>"
        );
        answer("200 OK", &[], body.as_bytes())
    };
    type Answer = Box<dyn Fn(&str) -> Vec<u8> + Send + Sync>;
    let count = std::sync::atomic::AtomicUsize::new(0);
    let cases: Vec<(&str, Answer)> = vec![
        ("does not go on after a key", Box::new(|_| page(None, |_| TRUNCATED.to_owned(), ""))),
        ("the same token", Box::new(move |_| empty("same".to_owned()))),
        (
            "empty pages",
            Box::new(move |_| empty(count.fetch_add(1, std::sync::atomic::Ordering::SeqCst).to_string())),
        ),
        (
            "has no token for the next one",
            Box::new(|_| {
                let body = format!("<ListBucketResult>{TRUNCATED}</ListBucketResult>");
                answer("200 OK", &[], body.as_bytes())
            }),
        ),
        ("another form", Box::new(|_| answer("200 OK", &[], b"<html>sign in</html>"))),
    ];
    for (words, answers) in cases {
        let server = ScriptedServer::start(answers);
        let error = listed(&server, Credentials::Anonymous).await.expect_err(words);
        assert!(matches!(error, OriginError::WrongAnswer { .. }), "{words}: {error:?}");
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(server.heads().len() <= 1002, "{words}: {}", server.heads().len());
    }
}
