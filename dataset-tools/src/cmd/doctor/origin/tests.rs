use super::super::finding::Severity;
use super::*;
use fletch_testkit::scripted::{ScriptedServer, answer};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};

fn config(endpoint: &str) -> OriginConfig {
    OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(endpoint.to_owned()),
        region: Some("local".to_owned()),
        credentials: Some(fletch_origin::Credentials::Anonymous),
        allow_http: true,
        ..OriginConfig::default()
    }
}

async fn facts(endpoint: &str, uri: &str, role: Role) -> Facts {
    let limits = OriginLimits { attempts_max: 1, ..OriginLimits::default() };
    let origins = Origins::new(vec![config(endpoint)], limits).expect("origins");
    look(&origins, &OriginUri::parse(uri).expect("uri"), role).await
}

fn bucket() -> OriginEmulator {
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    origin.insert("set/a", "content");
    origin
}

#[track_caller]
fn only(facts: &Facts) -> Finding {
    let found = facts.findings();
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().expect("one")
}

#[tokio::test]
async fn a_healthy_origin_has_no_finding() {
    let origin = bucket();
    let facts = facts(&origin.endpoint(), "s3://bucket/set", Role::Tables).await;
    assert_eq!(facts.findings(), []);
    assert!(facts.ahead_s.is_some_and(|s| s.abs() <= 2), "hyper sends the date: {:?}", facts.ahead_s);
    assert_eq!(origin.object("set/a").as_deref(), Some(&b"content"[..]));
    assert_eq!(origin.counts().put, origin.counts().delete + 1, "the probe object is gone");
}

#[tokio::test]
async fn an_origin_that_refuses_or_has_no_such_bucket_is_named() {
    let origin = bucket();
    origin.set_fault("", Fault::Error { rate: 1.0, status: 403 }, None);
    let found = only(&facts(&origin.endpoint(), "s3://bucket/set", Role::Data).await);
    assert!(found.severity == Severity::Error && found.fix.contains("AWS_ACCESS_KEY_ID"), "{found:?}");
    origin.clear_faults();
    assert_eq!(facts(&origin.endpoint(), "s3://bucket/set", Role::Data).await.findings(), [], "the fix");

    let other = OriginEmulator::start(
        EmulatorConfig { bucket: "other".into(), ..Default::default() },
        Backing::empty(),
    );
    let found = only(&facts(&other.endpoint(), "s3://bucket/set", Role::Data).await);
    assert!(found.severity == Severity::Error && found.fix.contains("name of the bucket"), "{found:?}");

    let found = only(&facts(&origin.endpoint(), "s3://bucket/none", Role::Data).await);
    assert!(found.severity == Severity::Warning && found.what.contains("no objects"), "{found:?}");
}

#[tokio::test]
async fn a_wrong_region_and_a_wrong_clock_are_named() {
    let refuse = |status: &'static str, code: &'static str| {
        ScriptedServer::start(move |_| {
            let body = format!("<Error><Code>{code}</Code></Error>");
            let date = ("Date", "Sun, 06 Nov 1994 08:49:37 GMT");
            answer(status, &[date, ("x-amz-bucket-region", "eu-west-1")], body.as_bytes())
        })
    };
    for (status, code, fix) in [
        ("301 Moved Permanently", "PermanentRedirect", "AWS_REGION"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "AWS_REGION"),
        ("403 Forbidden", "RequestTimeTooSkewed", "timedatectl"),
    ] {
        let server = refuse(status, code);
        let facts = facts(&server.endpoint(), "s3://bucket/set", Role::Data).await;
        let found = only(&facts);
        assert!(found.severity == Severity::Error && found.fix.contains(fix), "{code}: {found:?}");
        assert!(facts.ahead_s.is_some_and(|s| s < -900_000_000), "{:?}", facts.ahead_s);
    }
}

#[tokio::test]
async fn a_slow_origin_and_one_without_conditional_writes_are_warnings() {
    let origin = bucket();
    origin.set_fault("", Fault::IgnoreConditions, None);
    let mut facts = facts(&origin.endpoint(), "s3://bucket/set", Role::Tables).await;
    let found = only(&facts);
    assert!(found.severity == Severity::Warning && found.check == WRITE, "{found:?}");
    facts.conditional = None;
    assert_eq!(facts.findings(), []);
    facts.first_byte = SLOW;
    let found = only(&facts);
    assert!(found.severity == Severity::Warning && found.fix.contains("fletch pack"), "{found:?}");
}

#[tokio::test]
async fn the_wait_for_the_first_byte_is_measured() {
    let slow = fletch_testkit::Latency { median: SLOW, p99: SLOW };
    let config = EmulatorConfig { first_byte: Some(slow), ..EmulatorConfig::default() };
    let origin = OriginEmulator::start(config, Backing::empty());
    let found = only(&facts(&origin.endpoint(), "s3://bucket/set", Role::Tables).await);
    assert!(found.what.contains("until its first byte"), "{found:?}");
}

#[test]
fn the_environment_describes_a_store() {
    let variable = |name: &str| match name {
        "AWS_ENDPOINT_URL" => Some("http://127.0.0.1:9000".to_owned()),
        "AWS_REGION" => Some("eu-west-1".to_owned()),
        _ => None,
    };
    let at = |uri: &str| from_environment(&OriginUri::parse(uri).expect("uri"), &variable).expect("readable");
    let s3 = at("s3://bucket/a/b").expect("a store");
    assert_eq!((s3.prefix.as_str(), s3.region.as_deref()), ("s3://bucket", Some("eu-west-1")));
    assert!(s3.allow_http && s3.endpoint.is_some());
    assert!(!at("gs://bucket/a").expect("a store").allow_http);
    assert_eq!(at("/data"), None);
}
