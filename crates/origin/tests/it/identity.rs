//! Credentials from metadata services and pod identity, and addresses from the environment.
//!
//! Each test starts itself again as a child with other variables: a process has one environment.
//!
//! The fake services listen on loopback and are named by `0.0.0.0`, which Linux connects to this machine. A
//! client of data refuses that address, as it refuses `169.254.169.254`; a client of credentials does not. So
//! these tests show that the two are different clients.

use crate::{limits, uri};
use fletch_origin::{Credentials, OriginConfig, OriginError, Origins};
use fletch_testkit::scripted::{ScriptedServer, answer, header};
use fletch_testkit::tls::authority;
use std::process::Command;

pub const CHILD: &str = "FLETCH_TEST_ORIGIN_CHILD";

/// Returns the configuration that the parent gave this process, if it is the child.
fn child() -> Option<OriginConfig> {
    let text = std::env::var(CHILD).ok()?;
    let (prefix, endpoint) = text.split_once(' ').expect("a prefix and an endpoint");
    Some(OriginConfig {
        prefix: prefix.to_owned(),
        endpoint: Some(endpoint.to_owned()).filter(|e| !e.is_empty()),
        account: prefix.starts_with("az://").then(|| "account".to_owned()),
        credentials: Some(Credentials::Env),
        allow_http: true,
        ..OriginConfig::default()
    })
}

/// Reads an object in the child. Prints the bytes or the error.
async fn read(config: OriginConfig) {
    let at = uri(&config.prefix);
    let origin = Origins::new(vec![config], limits(5_000)).expect("right").open(&at).expect("open");
    match origin.get("x", None, None).await {
        Ok(got) => println!("read: {}", String::from_utf8_lossy(&got.bytes)),
        Err(error @ OriginError::Denied { .. }) => println!("denied: {error}"),
        Err(error @ OriginError::Invalid { .. }) => println!("invalid: {error}"),
        Err(error) => println!("error: {error}"),
    }
}

/// Runs the named test of this file, or `MODULE::TEST`, again with these variables. Returns its output.
pub fn again(test: &str, prefix: &str, endpoint: &str, vars: &[(&str, String)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    let test = if test.contains("::") { test.to_owned() } else { format!("identity::{test}") };
    command.args([&test, "--exact", "--nocapture"]);
    for (name, _) in std::env::vars() {
        if ["AWS_", "AZURE_", "GOOGLE_", "GCE_", "IDENTITY_", "MSI_", "HTTP"]
            .iter()
            .any(|p| name.starts_with(p))
        {
            command.env_remove(name);
        }
    }
    let home = tempfile::tempdir().expect("tempdir");
    command.env("HOME", home.path()).env(CHILD, format!("{prefix} {endpoint}"));
    let out = command.envs(vars.iter().map(|(k, v)| (*k, v.as_str()))).output().expect("the child runs");
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}");
    text
}

/// A store that returns `the bytes` to signed requests, and 403 to others.
pub fn store() -> ScriptedServer {
    ScriptedServer::start(|head| match header(head, "authorization") {
        Some(_) => answer(
            "200 OK",
            &[("ETag", "\"e\""), ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT")],
            b"the bytes",
        ),
        None => answer("403 Forbidden", &[], b""),
    })
}

/// Returns the address of a server by the name that only a client of credentials connects to.
fn by_any(server: &ScriptedServer) -> String {
    format!("http://0.0.0.0:{}", server.address().port())
}

const AWS_KEY: &str = r#"{"Code": "Success", "AccessKeyId": "AKIAFAKE", "SecretAccessKey": "s3cret",
    "Token": "t0ken", "Expiration": "2100-01-01T00:00:00Z", "Type": "AWS-HMAC"}"#;

#[tokio::test]
async fn an_instance_role_signs_the_requests() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let metadata = ScriptedServer::start(|head| {
        if head.starts_with("PUT /latest/api/token ") {
            return answer("200 OK", &[], b"imds-token");
        }
        if header(head, "x-aws-ec2-metadata-token") != Some("imds-token") {
            return answer("401 Unauthorized", &[], b"");
        }
        match head.split(' ').nth(1).expect("a path") {
            "/latest/meta-data/iam/security-credentials/" => answer("200 OK", &[], b"the-role"),
            "/latest/meta-data/iam/security-credentials/the-role" => {
                answer("200 OK", &[], AWS_KEY.as_bytes())
            }
            _ => answer("404 Not Found", &[], b""),
        }
    });
    let store = store();
    let vars = [("AWS_METADATA_ENDPOINT", by_any(&metadata))];
    let text = again("an_instance_role_signs_the_requests", "s3://bucket", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    assert_eq!(metadata.heads().len(), 3, "{:#?}", metadata.heads());
    let signed = store.heads();
    assert!(signed[0].contains("Credential=AKIAFAKE/") && signed[0].contains("t0ken"), "{signed:#?}");
}

#[tokio::test]
async fn an_older_instance_metadata_service_is_asked_without_a_token() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let metadata = ScriptedServer::start(|head| match head.split(' ').nth(1).expect("a path") {
        "/latest/meta-data/iam/security-credentials/" => answer("200 OK", &[], b"the-role"),
        "/latest/meta-data/iam/security-credentials/the-role" => answer("200 OK", &[], AWS_KEY.as_bytes()),
        _ => answer("403 Forbidden", &[], b""),
    });
    let store = store();
    let vars = [("AWS_METADATA_ENDPOINT", by_any(&metadata)), ("AWS_IMDSV1_FALLBACK", "true".to_owned())];
    let test = "an_older_instance_metadata_service_is_asked_without_a_token";
    let text = again(test, "s3://bucket", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
}

#[tokio::test]
async fn a_pod_identity_signs_the_requests() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let agent = ScriptedServer::start(|head| match header(head, "authorization") {
        Some("pod-token") => answer("200 OK", &[], AWS_KEY.as_bytes()),
        _ => answer("401 Unauthorized", &[], b""),
    });
    let store = store();
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("token");
    std::fs::write(&file, "pod-token").expect("written");
    let vars = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{}/v1/credentials", by_any(&agent))),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", file.display().to_string()),
    ];
    let text = again("a_pod_identity_signs_the_requests", "s3://bucket", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    assert!(store.heads()[0].contains("Credential=AKIAFAKE/"));
}

#[tokio::test]
async fn a_managed_identity_of_azure_signs_the_requests() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let metadata = ScriptedServer::start(|_| {
        answer(
            "200 OK",
            &[],
            br#"{"access_token": "az-token", "expires_on": "4102444800", "token_type": "Bearer"}"#,
        )
    });
    let store = store();
    let vars = [("AZURE_MSI_ENDPOINT", format!("{}/metadata/identity/oauth2/token", by_any(&metadata)))];
    let test = "a_managed_identity_of_azure_signs_the_requests";
    let text = again(test, "az://container", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    assert_eq!(header(&store.heads()[0], "authorization"), Some("Bearer az-token"));
}

#[tokio::test]
async fn an_instance_identity_of_google_signs_the_requests() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let metadata = ScriptedServer::start(|head| match header(head, "metadata-flavor") {
        Some("Google") => answer(
            "200 OK",
            &[],
            br#"{"access_token": "g-token", "expires_in": 3600, "token_type": "Bearer"}"#,
        ),
        _ => answer("403 Forbidden", &[], b""),
    });
    let store = store();
    let host = format!("0.0.0.0:{}", metadata.address().port());
    let vars = [("GCE_METADATA_HOST", host.clone()), ("GCE_METADATA_IP", host)];
    let test = "an_instance_identity_of_google_signs_the_requests";
    let text = again(test, "gs://bucket", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    assert_eq!(header(&store.heads()[0], "authorization"), Some("Bearer g-token"));
}

#[tokio::test]
async fn a_credential_service_follows_no_redirect_and_is_not_quoted() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let other = ScriptedServer::start(|_| answer("200 OK", &[], b"hunter2"));
    let target = other.endpoint();
    let test = "a_credential_service_follows_no_redirect_and_is_not_quoted";
    for status in ["302 Found", "400 Bad", "404 Not Found", "200 OK"] {
        let location = target.clone();
        let metadata =
            ScriptedServer::start(move |_| answer(status, &[("Location", &location)], b"[\"hunter2\"]"));
        let store = store();
        let vars = [("AWS_METADATA_ENDPOINT", by_any(&metadata))];
        let text = again(test, "s3://bucket", &store.endpoint(), &vars);
        assert!(text.contains("denied: ") && text.contains("credential service"), "{status}: {text}");
        assert!(!text.contains("hunter2"), "{status}: {text}");
        assert_eq!(store.heads().len(), 0, "no unsigned request");
    }
    assert_eq!(other.heads().len(), 0, "no redirect is followed");
}

const ROLE: &str = "arn:aws:iam::123456789012:role/reader";
const WEB_TOKEN: &str = "web-t0ken";
pub const ASSUMED: &str = "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>\
    <SessionToken>t0ken</SessionToken><SecretAccessKey>s3cret</SecretAccessKey>\
    <AccessKeyId>AKIAFAKE</AccessKeyId><Expiration>2100-01-01T00:00:00Z</Expiration></Credentials>\
    </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>";

/// Returns a file with a web identity, and the variables that name it and a token service.
fn web_identity(service: String) -> (tempfile::TempDir, Vec<(&'static str, String)>) {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("token");
    std::fs::write(&file, WEB_TOKEN).expect("written");
    let vars = vec![
        ("AWS_WEB_IDENTITY_TOKEN_FILE", file.display().to_string()),
        ("AWS_ROLE_ARN", ROLE.to_owned()),
        ("AWS_ENDPOINT_URL_STS", service),
        ("SSL_CERT_FILE", authority().display().to_string()),
    ];
    (dir, vars)
}

/// Returns the address of a server with TLS by the name that only a client of credentials connects to.
fn by_any_tls(server: &ScriptedServer) -> String {
    by_any(server).replace("http:", "https:")
}

#[tokio::test]
async fn a_web_identity_signs_the_requests() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let service = ScriptedServer::start_tls(|_| answer("200 OK", &[], ASSUMED.as_bytes()));
    let store = store();
    let (_dir, vars) = web_identity(by_any_tls(&service));
    let text = again("a_web_identity_signs_the_requests", "s3://bucket", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    let asked = service.heads();
    let line = asked[0].lines().next().expect("a request line");
    for part in ["POST /?Action=AssumeRoleWithWebIdentity&", "role%2Freader&", "WebIdentityToken=web-t0ken"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let signed = store.heads();
    assert!(signed[0].contains("Credential=AKIAFAKE/") && signed[0].contains("t0ken"), "{signed:#?}");
    assert!(!signed[0].contains(WEB_TOKEN), "{signed:#?}");
}

/// The request to a token service has the identity in its URL, and its answer has the secret.
#[tokio::test]
async fn a_token_service_gets_nothing_in_the_clear_and_no_error_has_the_identity() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let test = "a_token_service_gets_nothing_in_the_clear_and_no_error_has_the_identity";
    let other = ScriptedServer::start(|_| answer("200 OK", &[], ASSUMED.as_bytes()));
    let run = |service: String, trusted: bool| {
        let store = store();
        let (_dir, mut vars) = web_identity(service);
        if !trusted {
            vars.retain(|(name, _)| *name != "SSL_CERT_FILE");
        }
        let text = again(test, "s3://bucket", &store.endpoint(), &vars);
        assert!(!text.contains("read: "), "{text}");
        assert!(!text.contains(WEB_TOKEN) && !text.contains("s3cret"), "{text}");
        assert_eq!(store.heads().len(), 0, "no unsigned request");
        text
    };
    let refused = run(by_any(&other), true);
    assert!(refused.contains("credential service"), "{refused}");
    assert_eq!(other.heads().len(), 0, "nothing goes over HTTP");
    let target = other.endpoint();
    let secret = "<Error>s3cret</Error>";
    for status in ["302 Found", "400 Bad Request", "403 Forbidden", "200 OK"] {
        let location = target.clone();
        let service =
            ScriptedServer::start_tls(move |_| answer(status, &[("Location", &location)], secret.as_bytes()));
        let text = run(by_any_tls(&service), true);
        assert!(text.contains("denied: ") && text.contains("credential service"), "{status}: {text}");
        assert_eq!(other.heads().len(), 0, "{status}: no redirect is followed");
    }
    let unknown = ScriptedServer::start_tls(|_| answer("200 OK", &[], ASSUMED.as_bytes()));
    let text = run(by_any_tls(&unknown), false);
    assert!(text.contains("credential service"), "{text}");
    assert_eq!(unknown.heads().len(), 0, "an unknown certificate gets no request");
}

#[tokio::test]
async fn a_workload_identity_of_azure_signs_the_requests() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let service = ScriptedServer::start_tls(|_| {
        answer("200 OK", &[], br#"{"access_token": "az-token", "expires_in": 3600}"#)
    });
    let store = store();
    let (dir, _) = web_identity(String::new());
    let vars = [
        ("AZURE_FEDERATED_TOKEN_FILE", dir.path().join("token").display().to_string()),
        ("AZURE_CLIENT_ID", "client".to_owned()),
        ("AZURE_TENANT_ID", "tenant".to_owned()),
        ("AZURE_AUTHORITY_HOST", by_any_tls(&service)),
        ("SSL_CERT_FILE", authority().display().to_string()),
    ];
    let test = "a_workload_identity_of_azure_signs_the_requests";
    let text = again(test, "az://container", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    assert!(service.heads()[0].starts_with("POST /tenant/oauth2/v2.0/token "), "{:?}", service.heads());
    assert_eq!(header(&store.heads()[0], "authorization"), Some("Bearer az-token"));
}

/// Without `endpoint` in the configuration, the store's address comes from the environment. It is checked
/// when the client connects.
#[tokio::test]
async fn the_address_of_a_store_from_the_environment_is_checked() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let store = store();
    let vars = [
        ("AWS_ENDPOINT_URL", by_any(&store)),
        ("AWS_ACCESS_KEY_ID", "AKIAFAKE".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "s3cret".to_owned()),
    ];
    let test = "the_address_of_a_store_from_the_environment_is_checked";
    let text = again(test, "s3://bucket", "", &vars);
    assert!(text.contains("invalid: ") && text.contains("0.0.0.0, an unspecified address"), "{text}");
    assert_eq!(store.heads().len(), 0);
}

#[tokio::test]
async fn a_proxy_of_the_environment_is_not_used() {
    if let Some(config) = child() {
        return read(config).await;
    }
    let proxy = ScriptedServer::start(|_| answer("502 Bad Gateway", &[], b""));
    let store = store();
    let mut vars =
        vec![("AWS_ACCESS_KEY_ID", "AKIAFAKE".to_owned()), ("AWS_SECRET_ACCESS_KEY", "s3cret".to_owned())];
    vars.extend(["HTTP_PROXY", "http_proxy", "ALL_PROXY"].map(|name| (name, proxy.endpoint())));
    let text = again("a_proxy_of_the_environment_is_not_used", "s3://bucket", &store.endpoint(), &vars);
    assert!(text.contains("read: the bytes"), "{text}");
    assert_eq!(proxy.heads().len(), 0);
}

#[tokio::test]
async fn a_configured_proxy_is_used_and_addresses_are_still_checked() {
    let proxy = ScriptedServer::start(|_| answer("200 OK", &[("ETag", "\"e\"")], b"by proxy"));
    let config = OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some("http://store.invalid:9000".to_owned()),
        credentials: Some(Credentials::Anonymous),
        allow_http: true,
        proxy: Some(proxy.endpoint()),
        ..OriginConfig::default()
    };
    let origins = Origins::new(vec![config.clone()], limits(5_000)).expect("right");
    let origin = origins.open(&uri("s3://bucket")).expect("open");
    let got = origin.get("x", None, None).await.expect("through the proxy, which knows the name");
    assert_eq!(got.bytes, "by proxy");
    assert!(proxy.heads()[0].starts_with("GET http://store.invalid:9000/bucket/x "), "{:?}", proxy.heads());
    let refused = OriginConfig { endpoint: Some("http://169.254.169.254".to_owned()), ..config.clone() };
    Origins::new(vec![refused], limits(5_000)).expect_err("a metadata service");
    for bad in ["proxy.example:3128", "http://user:hunter2@proxy", "socks5://proxy", "http://proxy/path"] {
        let text =
            Origins::new(vec![OriginConfig { proxy: Some(bad.to_owned()), ..config.clone() }], limits(1))
                .expect_err(bad)
                .to_string();
        assert!(text.contains("proxy") && !text.contains("hunter2"), "{text}");
    }
}
