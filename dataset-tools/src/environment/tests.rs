use super::*;
use std::collections::BTreeSet;

fn given(uri: &str, vars: &[(&str, &str)]) -> GiveCredentials {
    let uri = OriginUri::parse(uri).expect("uri");
    let var = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let config = config_of(&uri, &var).expect("readable").expect("a store");
    to_give(&config, &uri, &var).expect("readable").expect("a store")
}

#[test]
fn variables_become_what_the_own_server_gets() {
    let g = given(
        "s3://photos/set",
        &[
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_SESSION_TOKEN", "session"),
            ("AWS_CREDENTIAL_EXPIRATION", "1970-01-01T00:00:07Z"),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("AWS_REGION", "eu"),
        ],
    );
    assert_eq!((g.origin.as_str(), g.secrets.0.len(), g.options.credentials), ("s3://photos", 3, None));
    assert_eq!((g.options.endpoint.as_deref(), g.options.allow_http), (Some("http://127.0.0.1:9000"), true));
    assert_eq!((g.options.region.as_deref(), g.expires_ns), (Some("eu"), Some(7_000_000_000)));
    let g = given("az://container/set", &[("AZURE_STORAGE_ACCOUNT", "a"), ("AZURE_STORAGE_KEY", "k")]);
    assert_eq!(g.options.account.as_deref(), Some("a"));
    assert_eq!(g.secrets.0["azure_storage_account_key"], "k");
    let g = given("s3://bucket", &[("AWS_NO_SIGN_REQUEST", "true")]);
    assert_eq!(g.options.credentials.as_deref(), Some("anonymous"));
    let g = given("https://host/data", &[]);
    assert_eq!((g.origin.as_str(), g.options.credentials.as_deref()), ("https://host", Some("anonymous")));
    let g = given("http://127.0.0.1:80/data", &[]);
    assert!(g.options.allow_http);
    let far = OriginUri::parse("http://far/data").expect("uri");
    assert!(config_of(&far, &|_| None).expect("readable").is_none(), "unencrypted, over a network");
}

#[test]
fn a_profile_of_the_shared_file_is_handed_over() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("credentials");
    let text = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n\
                [work]\naws_access_key_id = c\naws_secret_access_key = d\nother = e\n";
    std::fs::write(&file, text).expect("write");
    let path = file.display().to_string();
    let g = given("s3://bucket", &[("AWS_SHARED_CREDENTIALS_FILE", &path), ("AWS_PROFILE", "work")]);
    assert_eq!((g.secrets.0["aws_access_key_id"].as_str(), g.secrets.0.len()), ("c", 2));
    let g = given("s3://bucket", &[("AWS_SHARED_CREDENTIALS_FILE", "/none")]);
    let unknown = OriginUri::parse("s3://bucket").expect("uri");
    assert!(config_of(&unknown, &|_| None).expect("readable").is_none(), "nothing is known of that cloud");
    assert_eq!(g.options.credentials.as_deref(), Some("env"), "the identity of the machine");
    let key = dir.path().join("key.json");
    std::fs::write(&key, r#"{"type": "service_account"}"#).expect("write");
    let g = given("gs://bucket", &[("GOOGLE_APPLICATION_CREDENTIALS", &key.display().to_string())]);
    assert!(g.secrets.0.contains_key("google_service_account_key"));
}

/// The variables of each scheme with values that count, in groups that do not hide one another.
fn groups(dir: &Path) -> Vec<(&'static str, Vec<(&'static str, String)>)> {
    let file = |name: &str, text: &str| {
        std::fs::write(dir.join(name), text).expect("write");
        dir.join(name).display().to_string()
    };
    let pem = fletch_testkit::tls::authority().display().to_string();
    let config = file(
        "config",
        "[profile work]\nregion = eu-west-3\nendpoint_url = https://store.example\ns3 =\n \
         addressing_style = virtual\n",
    );
    let shared = "[work]\naws_access_key_id = a\naws_secret_access_key = b\naws_session_token = c\n";
    let shared = file("credentials", shared);
    let account = file("key.json", r#"{"type": "service_account", "private_key": "k"}"#);
    let of = |list: &[(&'static str, &str)]| list.iter().map(|(k, v)| (*k, (*v).to_owned())).collect();
    vec![
        (
            "s3",
            of(&[
                ("AWS_ACCESS_KEY_ID", "id"),
                ("AWS_SECRET_ACCESS_KEY", "secret"),
                ("AWS_SESSION_TOKEN", "token"),
                ("AWS_CREDENTIAL_EXPIRATION", "2100-01-01T00:00:00Z"),
                ("AWS_REGION", "eu-west-1"),
                ("AWS_ENDPOINT_URL", "https://all.example"),
                ("AWS_REQUEST_PAYER", "requester"),
                ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true"),
                ("AWS_CA_BUNDLE", &pem),
            ]),
        ),
        (
            "s3",
            of(&[
                ("AWS_ACCESS_KEY_ID", "id"),
                ("AWS_SECRET_ACCESS_KEY", "secret"),
                ("AWS_SESSION_TOKEN", "token"),
                ("AWS_SESSION_EXPIRATION", "2100-01-01T00:00:00Z"),
                ("AWS_DEFAULT_REGION", "eu-west-2"),
                ("AWS_ENDPOINT_URL_S3", "http://s3.example"),
                ("SSL_CERT_FILE", &pem),
            ]),
        ),
        (
            "s3",
            of(&[
                ("AWS_CONFIG_FILE", &config),
                ("AWS_SHARED_CREDENTIALS_FILE", &shared),
                ("AWS_PROFILE", "work"),
            ]),
        ),
        (
            "s3",
            of(&[
                ("AWS_CONFIG_FILE", &config),
                ("AWS_SHARED_CREDENTIALS_FILE", &shared),
                ("AWS_DEFAULT_PROFILE", "work"),
                ("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true"),
            ]),
        ),
        ("s3", of(&[("AWS_NO_SIGN_REQUEST", "true"), ("AWS_ENDPOINT", "https://other.example")])),
        ("s3", of(&[("AWS_SKIP_SIGNATURE", "1")])),
        (
            "az",
            of(&[
                ("AZURE_STORAGE_ACCOUNT", "a"),
                ("AZURE_STORAGE_KEY", "k"),
                ("AZURE_STORAGE_ENDPOINT", "https://blobs.example"),
                ("SSL_CERT_FILE", &pem),
            ]),
        ),
        (
            "az",
            of(&[
                ("AZURE_STORAGE_ACCOUNT_NAME", "a"),
                ("AZURE_STORAGE_ACCOUNT_KEY", "k"),
                ("AZURE_STORAGE_ACCESS_KEY", "k"),
                ("AZURE_STORAGE_SAS_TOKEN", "s"),
                ("AZURE_STORAGE_SAS_KEY", "s"),
                ("AZURE_STORAGE_TOKEN", "t"),
                ("AZURE_ENDPOINT", "https://blobs.example"),
            ]),
        ),
        (
            "az",
            of(&[
                ("AZURE_STORAGE_ACCOUNT_NAME", "a"),
                ("AZURE_CLIENT_ID", "c"),
                ("AZURE_CLIENT_SECRET", "s"),
                ("AZURE_TENANT_ID", "t"),
                ("AZURE_AUTHORITY_ID", "t"),
                ("AZURE_AUTHORITY_HOST", "https://login.example"),
                ("AZURE_FEDERATED_TOKEN_FILE", "/run/token"),
            ]),
        ),
        ("az", of(&[("AZURE_STORAGE_ACCOUNT", "a"), ("AZURE_SKIP_SIGNATURE", "true")])),
        (
            "gs",
            of(&[("GOOGLE_APPLICATION_CREDENTIALS", &account), ("GOOGLE_BASE_URL", "https://gcs.example")]),
        ),
        ("gs", of(&[("GOOGLE_SERVICE_ACCOUNT", &account), ("GOOGLE_ENDPOINT_URL", "https://gcs.example")])),
        ("gs", of(&[("GOOGLE_SERVICE_ACCOUNT_PATH", &account), ("SSL_CERT_FILE", &pem)])),
        ("gs", of(&[("GOOGLE_SERVICE_ACCOUNT_KEY", r#"{"private_key": "k"}"#)])),
        ("gs", of(&[("GOOGLE_SKIP_SIGNATURE", "true")])),
    ]
}

/// For each variable that the command honours, its server honours it: nothing of a configuration is lost.
#[test]
fn the_server_reaches_a_store_as_the_command_does() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut tried: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (scheme, vars) in groups(dir.path()) {
        let uri = OriginUri::parse(&format!("{scheme}://bucket/set")).expect("uri");
        let of = |without: &str| {
            let var = |name: &str| {
                let found = vars.iter().find(|(key, _)| *key == name && *key != without);
                found.map(|(_, value)| value.clone())
            };
            let config = config_of(&uri, &var).ok()??;
            let given = to_give(&config, &uri, &var).ok()??;
            Some((config, given))
        };
        let (config, given) = of("").expect("a store");
        let body = serde_json::to_vec(&given).expect("JSON");
        let server = fletch_server::fuzzing::given_credentials(&body).expect("taken");
        let OriginConfig {
            prefix,
            endpoint,
            region,
            virtual_hosted,
            request_payer,
            ca_file,
            ca_certificates,
            account,
            credentials,
            domains,
            allow_http,
            allow_link_local,
            proxy,
            concurrency,
            requests_per_second,
            bytes_per_second,
            configured_by,
        } = server.config().clone();
        let pem = config.ca_file.as_deref().map(|file| std::fs::read_to_string(file).expect("PEM"));
        assert_eq!((ca_file, ca_certificates), (None, pem), "{vars:?}");
        assert_eq!(configured_by, ConfiguredBy::Given);
        // What is handed over stands for the chain: the values themselves, or the kind of source.
        let is_unsigned = config.credentials == Some(Credentials::Anonymous);
        assert_eq!(credentials, is_unsigned.then_some(Credentials::Anonymous), "{vars:?}");
        assert_eq!(given.secrets.0.is_empty(), is_unsigned, "{vars:?}");
        let same = OriginConfig {
            prefix,
            endpoint,
            region,
            virtual_hosted,
            request_payer,
            ca_file: config.ca_file.clone(),
            ca_certificates: None,
            account,
            credentials: config.credentials.clone(),
            domains,
            allow_http,
            allow_link_local,
            proxy,
            concurrency,
            requests_per_second,
            bytes_per_second,
            configured_by: ConfiguredBy::Environment,
        };
        assert_eq!(same, config, "{vars:?}");
        // Each variable of the group changes what is handed over, so none is only read past.
        for (name, _) in &vars {
            assert_ne!(
                of(name).map(|(_, given)| given),
                Some(given.clone()),
                "{name} changes nothing: {vars:?}"
            );
            tried.insert((scheme, name));
        }
    }
    let all: BTreeSet<(&str, &str)> =
        VARIABLES.iter().flat_map(|(scheme, names)| names.iter().map(move |name| (*scheme, *name))).collect();
    let untried: Vec<_> = all.difference(&tried).collect();
    assert!(untried.is_empty(), "no group has {untried:?}");
    let unlisted: Vec<_> = tried.difference(&all).collect();
    assert!(unlisted.is_empty(), "VARIABLES lacks {unlisted:?}");
}
