//! What AWS's own tools read: styles of requests, authorities, and credentials behind a login.
//!
//! A test that needs variables starts itself again as a child, as those of `identity` do.

use crate::identity::{again, store};
use crate::{limits, uri};
use fletch_origin::{ConfiguredBy, Credentials, Given, OriginConfig, OriginError, Origins, read_authorities};
use fletch_testkit::scripted::{ScriptedServer, answer, header};
use fletch_testkit::tls::authority;
use std::collections::BTreeMap;
use std::fs;

const OBJECT: [(&str, &str); 2] = [("ETag", "\"e\""), ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT")];

fn s3(endpoint: &str) -> OriginConfig {
    OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(endpoint.to_owned()),
        credentials: Some(Credentials::Anonymous),
        allow_http: true,
        ..OriginConfig::default()
    }
}

async fn get(config: OriginConfig) -> Result<String, OriginError> {
    let at = uri(&config.prefix);
    let origin = Origins::new(vec![config], limits(5_000))?.open(&at)?;
    let got = origin.get("x", None, None).await?;
    Ok(String::from_utf8_lossy(&got.bytes).into_owned())
}

#[tokio::test]
async fn the_header_of_a_requester_who_pays_is_sent() {
    let server = ScriptedServer::start(|head| match header(head, "x-amz-request-payer") {
        Some("requester") => answer("200 OK", &OBJECT, b"paid"),
        _ => answer("403 Forbidden", &[], b""),
    });
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("keys");
    fs::write(&file, "aws_access_key_id = AKIA\naws_secret_access_key = s\n").expect("write");
    let signed = OriginConfig { credentials: Some(Credentials::File(file)), ..s3(&server.endpoint()) };
    let free = get(signed.clone()).await.expect_err("nobody pays");
    assert!(matches!(free, OriginError::Denied { .. }), "{free}");
    let paid = get(OriginConfig { request_payer: true, ..signed }).await;
    assert_eq!(paid.expect("paid"), "paid");
}

/// The store knows one style only. A proxy stands for the name of the store, which does not exist.
#[tokio::test]
async fn a_store_of_either_style_is_read() {
    let hosted = |head: &str| {
        let is_hosted = head.starts_with("GET http://bucket.store.invalid:9000/x ")
            && header(head, "host") == Some("bucket.store.invalid:9000");
        match is_hosted {
            true => answer("200 OK", &OBJECT, b"hosted"),
            false => answer("403 Forbidden", &[], b""),
        }
    };
    let proxy = ScriptedServer::start(hosted);
    let at = |endpoint: &str, virtual_hosted| OriginConfig {
        proxy: Some(proxy.endpoint()),
        virtual_hosted,
        ..s3(endpoint)
    };
    for endpoint in ["http://store.invalid:9000", "http://bucket.store.invalid:9000/"] {
        assert_eq!(get(at(endpoint, Some(true))).await.expect(endpoint), "hosted");
    }
    get(at("http://store.invalid:9000", None)).await.expect_err("an endpoint gets the path style");
    let heads = proxy.heads();
    assert!(heads.last().expect("one").starts_with("GET http://store.invalid:9000/bucket/x "), "{heads:?}");
    let error = get(s3_hosted("http://127.0.0.1:9000")).await.expect_err("an address has no names below it");
    assert!(error.to_string().contains("needs an endpoint with a name"), "{error}");
}

fn s3_hosted(endpoint: &str) -> OriginConfig {
    OriginConfig { virtual_hosted: Some(true), ..s3(endpoint) }
}

/// At AWS itself the host names the bucket, unless no certificate would fit it.
#[tokio::test]
async fn aws_is_asked_in_the_style_that_fits_the_bucket() {
    let proxy = ScriptedServer::start(|_| answer("502 Bad Gateway", &[], b""));
    for (bucket, host) in [
        ("bucket", "bucket.s3.eu-west-1.amazonaws.com"),
        ("a.bucket", "s3.eu-west-1.amazonaws.com"),
        ("Old_bucket", "s3.eu-west-1.amazonaws.com"),
    ] {
        let config = OriginConfig {
            prefix: format!("s3://{bucket}"),
            endpoint: None,
            region: Some("eu-west-1".to_owned()),
            proxy: Some(proxy.endpoint()),
            ..s3("")
        };
        get(config).await.expect_err("no tunnel");
        let head = proxy.heads().pop().expect("a request");
        assert!(head.starts_with(&format!("CONNECT {host}:443 ")), "{bucket}: {head}");
    }
}

#[tokio::test]
async fn an_authority_of_a_file_or_handed_over_is_trusted() {
    let server = ScriptedServer::start_tls(|_| answer("200 OK", &OBJECT, b"private"));
    let endpoint = format!("https://localhost:{}", server.address().port());
    let unknown = get(s3(&endpoint)).await.expect_err("an unknown authority");
    assert!(matches!(unknown, OriginError::Unavailable { .. }), "{unknown}");
    let by_file = OriginConfig { ca_file: Some(authority()), ..s3(&endpoint) };
    assert_eq!(get(by_file).await.expect("trusted"), "private");
    let plain =
        OriginConfig { prefix: endpoint.clone(), ca_file: Some(authority()), ..OriginConfig::default() };
    assert_eq!(get(plain).await.expect("trusted"), "private");
    let missing = get(OriginConfig { ca_file: Some("/none.pem".into()), ..s3(&endpoint) }).await;
    assert!(missing.expect_err("no file").to_string().starts_with("/none.pem: "));

    let pem = read_authorities(&authority()).expect("readable");
    let handed = |pem: &str| {
        let config = OriginConfig { ca_certificates: Some(pem.to_owned()), ..s3(&endpoint) };
        Given::new(config, BTreeMap::new(), None)
    };
    let bad = handed("hunter2").expect_err("no certificate").to_string();
    assert!(bad.starts_with("options.ca_certificates: ") && !bad.contains("hunter2"), "{bad}");
    let origins = Origins::new(Vec::new(), limits(5_000)).expect("right");
    origins.give(handed(&pem).expect("right"), 1).expect("taken");
    let origin = origins.open(&uri("s3://bucket")).expect("open");
    assert_eq!(origin.get("x", None, None).await.expect("trusted").bytes, "private");
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_in_the_error() {
    let error = get(s3("http://store.invalid:9000")).await.expect_err("no such name").to_string();
    assert!(error.contains("the name store.invalid of the server does not resolve"), "{error}");
}

/// Reads by the chain of the environment in the child; `FLETCH_TEST_GIVEN` hands the chain over instead.
async fn chained() -> bool {
    let Ok(text) = std::env::var(crate::identity::CHILD) else { return false };
    let (_, endpoint) = text.split_once(' ').expect("an endpoint");
    let config = OriginConfig {
        credentials: Some(Credentials::Chain),
        configured_by: ConfiguredBy::Environment,
        ..s3(endpoint)
    };
    let result = if std::env::var("FLETCH_TEST_GIVEN").is_ok() {
        let origins = Origins::new(Vec::new(), limits(5_000)).expect("right");
        let given = Given::new(config, BTreeMap::new(), None).expect("a chain");
        origins.give(given, 1).map(|()| "given".to_owned()).map_err(|e| e.to_string())
    } else {
        get(config).await.map_err(|e| e.to_string())
    };
    println!("result: {result:?}");
    true
}

fn aws_config(text: &str) -> (tempfile::TempDir, (&'static str, String)) {
    let home = tempfile::tempdir().expect("tempdir");
    let file = home.path().join("config");
    fs::write(&file, text).expect("write");
    (home, ("AWS_CONFIG_FILE", file.display().to_string()))
}

#[tokio::test]
async fn a_credential_process_signs_and_never_runs_for_what_was_handed_over() {
    if chained().await {
        return;
    }
    let test = "aws::a_credential_process_signs_and_never_runs_for_what_was_handed_over";
    let mark = tempfile::tempdir().expect("tempdir");
    let mark = mark.path().join("ran");
    let text = format!(
        "[profile p]\ncredential_process = touch {}; echo '{{\"Version\": 1, \"AccessKeyId\": \"AKIAFAKE\", \
         \"SecretAccessKey\": \"hunter2\", \"SessionToken\": \"t0ken\"}}'\n",
        mark.display()
    );
    fs::create_dir_all(mark.parent().expect("a parent")).expect("mkdir");
    let (_home, config) = aws_config(&text);
    let mut vars = vec![config, ("AWS_PROFILE", "p".to_owned())];
    let server = store();
    vars.push(("FLETCH_TEST_GIVEN", "1".to_owned()));
    let said = again(test, "s3://bucket", &server.endpoint(), &vars);
    assert!(said.contains("result: Err") && said.contains("are handed over as keys"), "{said}");
    assert!(!mark.exists(), "the program ran");
    vars.pop();
    let said = again(test, "s3://bucket", &server.endpoint(), &vars);
    assert!(said.contains("result: Ok(\"the bytes\")") && mark.exists(), "{said}");
    let signed = server.heads();
    assert!(signed[0].contains("Credential=AKIAFAKE/") && signed[0].contains("t0ken"), "{signed:?}");
    assert!(!said.contains("hunter2"), "{said}");
}

#[tokio::test]
async fn a_profile_of_single_sign_on_asks_the_portal() {
    if chained().await {
        return;
    }
    let test = "aws::a_profile_of_single_sign_on_asks_the_portal";
    let portal = ScriptedServer::start(|head| {
        let is_right = head.starts_with("GET /federation/credentials?role_name=reader&account_id=42 ")
            && header(head, "x-amz-sso_bearer_token") == Some("hunter2");
        match is_right {
            true => answer(
                "200 OK",
                &[],
                br#"{"roleCredentials": {"accessKeyId": "AKIASSO", "secretAccessKey": "s",
                    "sessionToken": "t", "expiration": 4102444800000}}"#,
            ),
            false => answer("401 Unauthorized", &[], b"hunter2"),
        }
    });
    let home = tempfile::tempdir().expect("tempdir");
    let aws = home.path().join(".aws");
    fs::create_dir_all(aws.join("sso/cache")).expect("mkdir");
    let config = "[default]\nsso_session = corp\nsso_account_id = 42\nsso_role_name = reader\n\
        [sso-session corp]\nsso_region = eu-west-1\nsso_start_url = https://corp.example/start\n";
    fs::write(aws.join("config"), config).expect("write");
    let server = store();
    let vars = [("HOME", home.path().display().to_string()), ("AWS_ENDPOINT_URL_SSO", portal.endpoint())];
    let without = again(test, "s3://bucket", &server.endpoint(), &vars);
    assert!(without.contains("run `aws sso login --profile default`"), "{without}");
    let token = |token: &str| {
        let text = format!(
            r#"{{"startUrl": "https://corp.example/start", "accessToken": "{token}",
                "expiresAt": "2100-01-01T00:00:00Z"}}"#
        );
        fs::write(aws.join("sso/cache/a.json"), text).expect("write");
    };
    token("old");
    let rejected = again(test, "s3://bucket", &server.endpoint(), &vars);
    assert!(rejected.contains("aws sso login") && !rejected.contains("hunter2"), "{rejected}");
    token("hunter2");
    let read = again(test, "s3://bucket", &server.endpoint(), &vars);
    assert!(read.contains("result: Ok(\"the bytes\")") && !read.contains("hunter2"), "{read}");
    assert!(server.heads()[0].contains("Credential=AKIASSO/"), "{:?}", server.heads());
}

#[tokio::test]
async fn a_profile_with_a_web_identity_asks_the_token_service() {
    if chained().await {
        return;
    }
    let test = "aws::a_profile_with_a_web_identity_asks_the_token_service";
    let service = ScriptedServer::start(|_| answer("200 OK", &[], crate::identity::ASSUMED.as_bytes()));
    let dir = tempfile::tempdir().expect("tempdir");
    let token = dir.path().join("token");
    fs::write(&token, "hunter2\n").expect("write");
    let (_home, config) = aws_config(&format!(
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nweb_identity_token_file = {}\n",
        token.display()
    ));
    let server = store();
    let said = again(
        test,
        "s3://bucket",
        &server.endpoint(),
        &[config, ("AWS_ENDPOINT_URL_STS", service.endpoint())],
    );
    assert!(said.contains("result: Ok(\"the bytes\")") && !said.contains("hunter2"), "{said}");
    assert!(server.heads()[0].contains("Credential=AKIAFAKE/"), "{:?}", server.heads());
}

#[tokio::test]
async fn without_any_credentials_the_places_are_named() {
    if chained().await {
        return;
    }
    let test = "aws::without_any_credentials_the_places_are_named";
    let (_home, config) = aws_config("[default]\nregion = eu-west-1\n");
    let server = store();
    let metadata = ScriptedServer::start(|_| answer("200 OK", &[], b"a login page"));
    for service in [metadata.endpoint(), "http://127.0.0.1:1".to_owned()] {
        let vars = [config.clone(), ("AWS_METADATA_ENDPOINT", service)];
        let said = again(test, "s3://bucket", &server.endpoint(), &vars);
        for part in [
            "access denied: no AWS credentials found (looked at AWS_ACCESS_KEY_ID, ",
            "~/.aws/credentials profile default",
            "/config profile default, this machine's identity: ",
            "check the credentials of this terminal",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("[[origin]]") && !said.contains("another form"), "{said}");
    }
}
