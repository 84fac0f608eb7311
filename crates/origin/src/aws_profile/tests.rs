use super::*;

/// The files of AWS's tools in a directory, which is the home of a user.
struct Home(tempfile::TempDir);

impl Home {
    fn new(config: &str, credentials: &str) -> Home {
        let home = tempfile::tempdir().expect("tempdir");
        std::fs::create_dir_all(home.path().join(".aws/sso/cache")).expect("mkdir");
        std::fs::write(home.path().join(".aws/config"), config).expect("write");
        std::fs::write(home.path().join(".aws/credentials"), credentials).expect("write");
        Home(home)
    }

    fn var<'a>(&'a self, set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |name| match name {
            "HOME" => Some(self.0.path().display().to_string()),
            _ => set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()),
        }
    }

    fn chain(&self, set: &[(&str, &str)]) -> Result<AwsChain, OriginError> {
        chain(&self.var(set))
    }
}

const CONFIG: &str = "[default]\nregion = eu-central-1\n[profile work]\nregion = eu-west-1\n\
    endpoint_url = https://all.example\nservices = mine\ns3 =\n  addressing_style = virtual\n\
    credential_process = /bin/print hunter2\nca_bundle = /etc/ca.pem\n\
    [services mine]\ns3 =\n  endpoint_url = https://s3.example\n\
    [profile role]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = work\n\
    [profile web]\nrole_arn = arn:aws:iam::1:role/r\nweb_identity_token_file = /run/token\n\
    [profile sso]\nsso_session = corp\nsso_account_id = 1\nsso_role_name = reader\n\
    [sso-session corp]\nsso_region = eu-west-1\nsso_start_url = https://corp.example/start\n\
    [profile legacy]\nsso_start_url = https://corp.example/start\nsso_region = eu-west-1\n\
    sso_account_id = 1\n[profile keys]\naws_access_key_id = AKIA\naws_secret_access_key = hunter2\n";

#[test]
fn a_profile_says_how_the_store_is_asked() {
    let home = Home::new(CONFIG, "[work]\nregion = us-west-2\n");
    let profile = AwsProfile::load(&home.var(&[("AWS_PROFILE", "work")])).expect("readable");
    assert_eq!(profile.region().as_deref(), Some("us-west-2"), "the file with credentials comes first");
    assert_eq!(profile.endpoint().as_deref(), Some("https://s3.example"), "the service's own endpoint");
    assert_eq!((profile.virtual_hosted(), profile.ignores_endpoints()), (Some(true), false));
    assert_eq!(profile.ca_bundle(), Some(PathBuf::from("/etc/ca.pem")));
    let default = AwsProfile::load(&home.var(&[])).expect("readable");
    assert_eq!((default.region().as_deref(), default.endpoint()), (Some("eu-central-1"), None));
    let named = AwsProfile::load(&home.var(&[("AWS_DEFAULT_PROFILE", "keys")])).expect("readable");
    assert!(named.exists() && !format!("{named:?}").contains("hunter2"), "{named:?}");
}

#[test]
fn each_kind_of_profile_is_read_or_named() {
    let home = Home::new(CONFIG, "");
    let of = |profile: &str| home.chain(&[("AWS_PROFILE", profile)]);
    let keys = ("AWS_ACCESS_KEY_ID", "AKIA");
    assert_eq!(home.chain(&[keys, ("AWS_PROFILE", "none")]), Ok(AwsChain::Variables));
    assert!(matches!(of("work"), Ok(AwsChain::Login(Login::Process { .. }))));
    assert!(matches!(of("web"), Ok(AwsChain::Login(Login::WebIdentity(_)))));
    assert!(matches!(of("sso"), Ok(AwsChain::Login(Login::Sso(_)))));
    let path = home.0.path().join(".aws/config");
    assert_eq!(of("keys"), Ok(AwsChain::File { path, profile: "keys".to_owned() }));
    for (profile, why) in [
        ("role", "aws configure export-credentials --profile role"),
        ("legacy", "has no sso_role_name; run `aws configure sso --profile legacy`"),
        ("none", "does not exist (looked at "),
    ] {
        let error = of(profile).expect_err(profile).to_string();
        assert!(error.starts_with(&format!("the AWS profile {profile}: ")) && error.contains(why), "{error}");
    }
    let Ok(AwsChain::Machine { looked_at }) = home.chain(&[]) else { panic!("no credentials by default") };
    assert!(looked_at.contains(".aws/credentials profile default"), "{looked_at}");
    assert!(!format!("{:?}", of("work")).contains("hunter2"));
}

#[test]
fn a_program_runs_once_for_all_who_need_its_credentials() {
    let home = Home::new("", "");
    let count = home.0.path().join("count");
    let command = format!(
        "echo x >> {}; echo '{{\"Version\": 1, \"AccessKeyId\": \"id\", \"SecretAccessKey\": \"hunter2\", \
         \"Expiration\": \"2100-01-01T00:00:00+00:00\"}}'",
        count.display()
    );
    std::fs::write(home.0.path().join(".aws/config"), format!("[default]\ncredential_process = {command}\n"))
        .expect("write");
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let _entered = runtime.enter();
    let config = OriginConfig { prefix: "s3://bucket".to_owned(), ..OriginConfig::default() };
    for _ in 0..3 {
        let keys = aws_keys(&config, &home.var(&[])).expect("printed").expect("keys");
        assert_eq!((keys.secrets["aws_access_key_id"].as_str(), keys.secrets.len()), ("id", 2));
        assert!(keys.expires > Some(SystemTime::now()) && !format!("{keys:?}").contains("hunter2"));
    }
    assert_eq!(std::fs::read_to_string(count).expect("it ran"), "x\n");
}

#[test]
fn a_login_of_single_sign_on_needs_a_token_that_is_valid() {
    let home = Home::new(CONFIG, "");
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let _entered = runtime.enter();
    let config = OriginConfig { prefix: "s3://bucket".to_owned(), ..OriginConfig::default() };
    let cache = home.0.path().join(".aws/sso/cache");
    let put = |name: &str, text: &str| std::fs::write(cache.join(name), text).expect("write");
    put(
        "other.json",
        r#"{"startUrl": "https://else.example", "accessToken": "hunter2",
            "expiresAt": "2100-01-01T00:00:00Z"}"#,
    );
    put("client.json", r#"{"clientId": "hunter2"}"#);
    let why = |portal: &str| {
        let set = [("AWS_PROFILE", "sso"), ("AWS_ENDPOINT_URL_SSO", portal)];
        let error = aws_keys(&config, &home.var(&set)).expect_err("no valid token").to_string();
        assert!(!error.contains("hunter2"), "{error}");
        error
    };
    let text = why("http://127.0.0.1:1/a");
    assert!(text.contains("there is no token") && text.contains("`aws sso login --profile sso`"), "{text}");
    let token = |at: &str| {
        put(
            "t.json",
            &format!(
                r#"{{"startUrl": "https://corp.example/start", "accessToken": "hunter2",
                    "expiresAt": "{at}"}}"#
            ),
        );
    };
    token("2001-01-01T00:00:00UTC");
    let text = why("http://127.0.0.1:1/b");
    assert!(text.contains("has expired") && text.contains("`aws sso login --profile sso`"), "{text}");
    token("2100-01-01T00:00:00Z");
    let text = why("http://sso.example/c");
    assert!(text.contains("must not travel unencrypted"), "{text}");
    let text = why("http://127.0.0.1:1/d");
    assert!(text.contains("no answer"), "{text}");
}
