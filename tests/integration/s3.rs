//! The S3 door through stock clients: object_store here, boto3 in `tests/s3`. It refuses what is signed
//! wrongly, foreign, revoked or gone, and no reply is short.

use fletch_testkit::{servers::s3_python, tls::Authority};
use fletch_tests::bins::{command, repo, run, stdout};
use fletch_tests::cluster::{ClusterServer, EtcdCluster, agreed};
use fletch_tests::fixture::{Site, index};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::{
    GetOptions, ObjectStore, ObjectStoreExt as _, aws::AmazonS3, aws::AmazonS3Builder, path::Path,
};
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path as FsPath, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The URL of the S3 door of a server.
fn door(info: &serde_json::Value) -> String {
    format!("http://{}", info["s3"]["listen"].as_str().expect("the S3 door is on"))
}

/// A server without tokens, with its S3 door on.
fn open_site(more: &[&str]) -> (Site, String) {
    let site = Site::start(&[&["--s3-listen", "127.0.0.1:0"], more].concat());
    let url = door(&site.json("/v1/info"));
    (site, url)
}

fn store(url: &str) -> AmazonS3 {
    let builder = AmazonS3Builder::new().with_endpoint(url).with_allow_http(true).with_bucket_name("fletch");
    let retry = object_store::RetryConfig { max_retries: 0, ..Default::default() };
    let keys = builder.with_access_key_id("any").with_secret_access_key("any").with_retry(retry);
    keys.build().expect("a client")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Returns bytes in which no chunk equals another one.
fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut bytes);
    bytes
}

/// A tree with names that need escapes. Returns the bytes of each key.
fn odd_tree(dir: &FsPath) -> BTreeMap<String, Vec<u8>> {
    let names = ["a b/c+d.txt", "a-b/c", "a/b", "é/日本%20.bin", "amp&<x>\"'", "x=y;z", "0", "sub/deep/er/z"];
    let mut all: BTreeMap<String, Vec<u8>> =
        names.iter().map(|name| ((*name).to_owned(), name.repeat(1000).into_bytes())).collect();
    all.insert("empty".to_owned(), Vec::new());
    all.insert("big.bin".to_owned(), noise(9 << 20));
    for i in 0..1100 {
        all.insert(format!("many/{i:04}"), format!("content {i}").into_bytes());
    }
    for (name, bytes) in &all {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(path, bytes).expect("write");
    }
    symlink("../big.bin", dir.join("sub/link")).expect("symlink");
    symlink("nowhere", dir.join("dangling")).expect("symlink");
    fs::create_dir(dir.join("void")).expect("mkdir");
    let big = all["big.bin"].clone();
    all.insert("sub/link".to_owned(), big);
    all.insert("void/".to_owned(), Vec::new());
    all
}

async fn get(store: &AmazonS3, path: &Path) -> object_store::Result<Vec<u8>> {
    Ok(store.get(path).await?.bytes().await?.to_vec())
}

#[test]
fn object_store_lists_and_reads_every_key() {
    let tree = TempDir::new().expect("tree");
    let want = odd_tree(tree.path());
    let (site, url) = open_site(&[]);
    let root = site.publish("odd", tree.path());
    let store = store(&url);
    runtime().block_on(async {
        let listed: Vec<_> = store.list(Some(&Path::from("odd"))).try_collect().await.expect("a list");
        assert_eq!(listed.len(), want.len(), "the list is complete");
        // This client drops the slash of the key of an empty folder, which it cannot read then.
        for object in listed.iter().filter(|object| object.location.as_ref() != "odd/void") {
            let key = object.location.as_ref().strip_prefix("odd/").expect("a key of the dataset");
            let bytes = want.get(key).unwrap_or_else(|| panic!("{key} was never there"));
            assert_eq!(object.size, bytes.len() as u64, "{key}");
            let hash = blake3::hash(bytes).to_string();
            assert_eq!(object.e_tag.as_deref(), Some(format!("\"{hash}\"").as_str()), "{key}");
            assert!(get(&store, &object.location).await.expect("its bytes") == *bytes, "{key}: other bytes");
            let head = store.head(&object.location).await.expect("its head");
            assert_eq!((head.size, &head.e_tag), (object.size, &object.e_tag), "{key}");
            assert_eq!(head.last_modified, object.last_modified, "{key}");
        }
        let listed = store.list_with_delimiter(Some(&Path::from("odd"))).await.expect("a list");
        let folders: Vec<&str> = listed.common_prefixes.iter().map(AsRef::as_ref).collect();
        assert_eq!(folders, ["odd/a", "odd/a b", "odd/a-b", "odd/many", "odd/sub", "odd/void", "odd/é"]);
        assert_eq!(listed.objects.len(), 5);
        let after = store.list_with_offset(Some(&Path::from("odd/many")), &Path::from("odd/many/1097"));
        assert_eq!(after.try_collect::<Vec<_>>().await.expect("a list").len(), 2);
        let big = Path::from("odd/big.bin");
        let range = store.get_range(&big, (4 << 20) - 5..(4 << 20) + 9).await.expect("a range");
        assert!(range[..] == want["big.bin"][(4 << 20) - 5..(4 << 20) + 9]);
        let pinned = get(&store, &Path::parse(format!("odd@{root}/0")).expect("a path")).await;
        assert_eq!(pinned.expect("by root"), want["0"]);
        conditions(&store, &big).await;
    });
    assert!(site.metric("fletch_bytes_total") > 0.0);
    let by_door = site.metrics().into_iter().filter(|(name, _)| name.contains("component=\"s3\""));
    assert!(by_door.map(|(_, bytes)| bytes).sum::<f64>() >= want["big.bin"].len() as f64);
    let requests = "fletch_requests_total{route=\"s3 ListObjectsV2\",status=\"200\"}";
    assert!(site.metrics()[requests] >= 4.0);
}

/// A listing costs by what it returns: that of a million keys is as fast as that of some thousands. With
/// `FLETCH_S3=full` the dataset has a million keys, and the bounds are those of the design.
#[test]
fn a_listing_costs_by_the_items_that_it_returns() {
    let is_full = std::env::var("FLETCH_S3").is_ok_and(|word| word == "full");
    let (folders, files) = if is_full { (1000, 1000) } else { (1000, 20) };
    let tree = TempDir::new().expect("tree");
    for folder in 0..folders {
        let dir = tree.path().join(format!("class-{folder:04}"));
        fs::create_dir(&dir).expect("mkdir");
        for file in 0..files {
            fs::File::create(dir.join(format!("{file:06}.jpg"))).expect("create");
        }
    }
    let (site, url) = open_site(&[]);
    let _ = site.publish("d", tree.path());
    let (client, runtime) = (reqwest::Client::new(), runtime());
    let ask = |query: &str| {
        let sent = client.get(format!("{url}/fletch?list-type=2&{query}")).send();
        runtime.block_on(async { sent.await.expect("an answer").text().await.expect("a list") })
    };
    let timed = |query: &str| {
        let text = ask(query);
        let mut times: Vec<Duration> = (0..9)
            .map(|_| {
                let begun = Instant::now();
                let same = ask(query) == text;
                assert!(same, "the same list");
                begun.elapsed()
            })
            .collect();
        times.sort_unstable();
        eprintln!("{query}: {:?} (median of {})", times[4], times.len());
        (text, times[4])
    };
    let (top, took) = timed("prefix=d/&delimiter=/");
    assert_eq!(top.matches("<CommonPrefixes>").count(), 1000);
    assert!(top.contains("<KeyCount>1000</KeyCount>") && top.contains("<IsTruncated>false</IsTruncated>"));
    assert!(took < Duration::from_millis(if is_full { 50 } else { 2000 }), "{took:?}");
    let (page, took) = timed("prefix=d/&start-after=d/class-0500/000007.jpg");
    assert_eq!(page.matches("<Contents>").count(), 1000);
    assert!(page.contains("<Key>d/class-0500/000008.jpg</Key>"), "it begins there");
    assert!(took < Duration::from_millis(if is_full { 20 } else { 2000 }), "{took:?}");
}

async fn conditions(store: &AmazonS3, key: &Path) {
    let etag = store.head(key).await.expect("a head").e_tag.expect("an entity tag");
    let with = |options: GetOptions| async move { store.get_opts(key, options).await };
    let same = GetOptions { if_match: Some(etag.clone()), ..Default::default() };
    assert!(with(same).await.is_ok());
    let other = GetOptions { if_match: Some("\"x\"".to_owned()), ..Default::default() };
    assert!(matches!(with(other).await, Err(object_store::Error::Precondition { .. })));
    let known = GetOptions { if_none_match: Some(etag), ..Default::default() };
    assert!(matches!(with(known).await, Err(object_store::Error::NotModified { .. })));
    let past = GetOptions { range: Some((20 << 20..21 << 20).into()), ..Default::default() };
    assert!(with(past).await.is_err());
    let absent = store.get(&Path::from("odd/absent")).await;
    assert!(matches!(absent, Err(object_store::Error::NotFound { .. })));
}

#[test]
fn a_listing_shows_one_version_while_the_tag_moves() {
    let (tree, tables) = (TempDir::new().expect("tree"), TempDir::new().expect("tables"));
    for i in 0..1500 {
        fs::write(tree.path().join(format!("old-{i:04}")), "old").expect("write");
    }
    let (site, url) = open_site(&[]);
    let root = index(tree.path(), tables.path(), &[]);
    let [uri, at] = [tree.path(), tables.path()].map(|dir| dir.display().to_string());
    site.register("d", &uri, &at);
    // Version 1 of the call: the marker is a key, which says nothing of a version.
    let by_marker = |name: &str, marker: &str| {
        let (status, page) = curl(&format!("{url}/fletch?prefix={name}/&marker={name}/{marker}"), &[]);
        assert_eq!(status, "200", "{page}");
        page.matches(&format!("<Key>{name}/old-")).count()
    };
    let pinned = format!("d@{root}");
    assert_eq!((by_marker("d", "a"), by_marker(&pinned, "a")), (1000, 1000));
    runtime().block_on(async {
        let store = store(&url);
        let mut list = store.list(Some(&Path::from("d")));
        let first = list.next().await.expect("a page").expect("a key");
        assert_eq!(first.location.as_ref(), "d/old-0000");
        let entries: Vec<_> = fs::read_dir(tree.path()).expect("tree").flatten().collect();
        for entry in entries {
            fs::rename(entry.path(), tree.path().join(format!("new-{}", entry.file_name().display())))
                .expect("rename");
        }
        let _ = index(tree.path(), tables.path(), &[]);
        tokio::time::sleep(Duration::from_millis(2100)).await;
        let rest: Vec<_> = list.try_collect().await.expect("the other page");
        assert_eq!(rest.len(), 1499);
        assert!(rest.iter().all(|key| key.location.as_ref().starts_with("d/old-")), "one version");
        let now: Vec<_> = store.list(Some(&Path::from("d"))).try_collect().await.expect("a list");
        assert!(now.len() == 1500 && now[0].location.as_ref() == "d/new-old-0000", "the moved tag");
    });
    assert_eq!(by_marker("d", "old-0999"), 0, "the next page by marker is of the version of now");
    assert_eq!(by_marker(&pinned, "old-0999"), 500, "a root pins the pages by marker, too");
}

#[test]
fn no_reply_is_short() {
    let tree = TempDir::new().expect("tree");
    let file = tree.path().join("big.bin");
    let bytes = noise(16 << 20);
    fs::write(&file, &bytes).expect("write");
    let (site, url) = open_site(&["--cache-size", "0"]);
    let _ = site.publish("d", tree.path());
    // The same size: only the hash of a later chunk says that the file is another one.
    let mut other = bytes.clone();
    other[9 << 20] ^= 1;
    fs::write(&file, &other).expect("write");
    runtime().block_on(async {
        let store = store(&url);
        let begun = store.get(&Path::from("d/big.bin")).await.expect("the first chunk is right");
        assert_eq!(begun.meta.size, 16 << 20);
        let read = begun.bytes().await;
        assert!(read.is_err(), "the connection is cut: {} bytes", read.map_or(0, |bytes| bytes.len()));
        let late = store.get_range(&Path::from("d/big.bin"), 9 << 20..(9 << 20) + 10).await;
        let told = late.expect_err("no wrong byte").to_string();
        assert!(told.contains("503"), "{told}");
    });
}

/// Sends a GET by curl. Returns the status and the body.
fn curl(url: &str, more: &[&str]) -> (String, String) {
    let mut c = Command::new("curl");
    c.args(["-sS", "--max-time", "30", "-w", "\n%{http_code}"]).args(more).arg(url);
    let printed = stdout(&run(&mut c));
    let (body, status) = printed.rsplit_once('\n').expect("a status");
    (status.to_owned(), body.to_owned())
}

#[test]
fn a_web_page_and_a_key_that_xml_cannot_hold_are_refused() {
    let tree = TempDir::new().expect("tree");
    fs::write(tree.path().join("a\u{1}b"), "control").expect("write");
    fs::write(tree.path().join("page.html"), "<script></script>").expect("write");
    let (site, url) = open_site(&[]);
    let _ = site.publish("d", tree.path());
    let list = format!("{url}/fletch?list-type=2&prefix=d/");
    let (status, told) = curl(&list, &[]);
    assert!(status == "400" && told.contains("encoding-type=url"), "{status} {told}");
    let (status, listed) = curl(&format!("{list}&encoding-type=url"), &[]);
    assert!(status == "200" && listed.contains("<Key>d/a%01b</Key>"), "{status} {listed}");
    assert_eq!(curl(&format!("{url}/fletch/d/a%01b"), &[]), ("200".to_owned(), "control".to_owned()));

    for page in ["Host: rebound.example", "Origin: http://page.example", "Sec-Fetch-Site: cross-site"] {
        let (status, told) = curl(&list, &["-H", page]);
        assert!(status == "403" && told.contains("<Code>AccessDenied</Code>"), "{page}: {status} {told}");
    }
    let html = format!("{url}/fletch/d/page.html?response-content-type=text/html");
    assert_eq!(curl(&html, &[]).0, "400", "only a signed request sets headers");
    let (_, head) = curl(&format!("{url}/fletch/d/page.html"), &["-I"]);
    assert!(head.contains("content-security-policy: sandbox"), "{head}");
    assert_eq!(curl(&format!("{url}/fletch/d/page.html"), &["-X", "DELETE"]).0, "405");
}

#[test]
fn the_door_speaks_the_tls_of_the_server() {
    let (dir, tree) = (TempDir::new().expect("dir"), TempDir::new().expect("tree"));
    fs::write(tree.path().join("one"), "one").expect("write");
    let authority = Authority::new("tests");
    let (cert, key) = authority.server(&["127.0.0.1"], 4000).write(dir.path(), "server");
    fs::write(dir.path().join("ca.pem"), authority.pem()).expect("write");
    let [cert, key] = [cert, key].map(|path| path.display().to_string());
    let ca = dir.path().join("ca.pem").display().to_string();
    let site = Site::start(&["--s3-listen", "127.0.0.1:0", "--tls-cert-file", &cert, "--tls-key-file", &key]);
    let (_, info) = curl(&format!("{}/v1/info", site.url), &["--cacert", &ca]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["s3"]["tls"], true);
    let url = door(&info);
    let (status, told) = curl(&url, &[]);
    assert!(status == "400" && told.contains("speaks TLS"), "{status} {told}");
    let (status, buckets) = curl(&url.replace("http:", "https:"), &["--cacert", &ca]);
    assert!(status == "200" && buckets.contains("<Name>fletch</Name>"), "{status} {buckets}");
}

/// A server with the tokens of two tenants, each with a dataset, and the files of both.
struct Tenants {
    site: Site,
    home: TempDir,
}

impl Tenants {
    fn start() -> Self {
        let home = TempDir::with_prefix("fletch-s3-").expect("home");
        let at = |name: &str| home.path().join(name).display().to_string();
        for tenant in ["a", "b"] {
            let mut new = command("fletch-server");
            new.args([
                "token",
                "new",
                "--tenant",
                tenant,
                "--append",
                &at("tokens.toml"),
                "--out",
                &at(tenant),
            ]);
            run(&mut new);
            fs::create_dir_all(home.path().join(format!("data-{tenant}"))).expect("mkdir");
            fs::write(home.path().join(format!("data-{tenant}/one.txt")), tenant.repeat(9000))
                .expect("write");
        }
        let part = home.path().join("part");
        new_key(&part, home.path(), 7);
        let site = secured(home.path());
        let tenants = Tenants { site, home };
        for tenant in ["a", "b"] {
            let (data, tables) =
                (at_dir(&tenants.home, "data", tenant), at_dir(&tenants.home, "tables", tenant));
            fs::create_dir(&tables).expect("mkdir");
            let _ = index(&data, &tables, &[]);
            let mut register = tenants.fletch(tenant);
            register.args(["register", &format!("set-{tenant}")]).arg(&data).arg("--tables").arg(&tables);
            run(&mut register);
        }
        tenants
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn fletch(&self, tenant: &str) -> Command {
        let mut c = command("fletch");
        c.env("FLETCH_SERVER", &self.site.url).env("FLETCH_TOKEN_FILE", self.path(tenant));
        c
    }

    /// Returns the variables that `fletch s3 credentials` prints.
    fn variables(&self, tenant: &str) -> BTreeMap<String, String> {
        let printed = stdout(&run(self.fletch(tenant).args(["s3", "credentials", "--ttl", "1h"])));
        let lines = printed.lines().filter_map(|line| line.strip_prefix("export ")?.split_once('='));
        lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    fn store(&self, tenant: &str) -> AmazonS3 {
        let variables = self.variables(tenant);
        let retry = object_store::RetryConfig { max_retries: 0, ..Default::default() };
        let builder = AmazonS3Builder::new().with_bucket_name("fletch").with_allow_http(true);
        let builder = builder.with_endpoint(&variables["AWS_ENDPOINT_URL"]).with_retry(retry);
        let builder = builder.with_access_key_id(&variables["AWS_ACCESS_KEY_ID"]);
        builder.with_secret_access_key(&variables["AWS_SECRET_ACCESS_KEY"]).build().expect("a client")
    }
}

/// Starts a server with the tokens and the key in `home`.
fn secured(home: &FsPath) -> Site {
    let at = |name: &str| home.join(name).display().to_string();
    let dirs = format!("{}=*", home.display());
    let door = ["--s3-listen", "127.0.0.1:0", "--s3-key-file", &at("s3.key")];
    Site::start(&[&door[..], &["--auth-tokens", &at("tokens.toml"), "--local-dirs", &dirs]].concat())
}

fn at_dir(home: &TempDir, name: &str, tenant: &str) -> PathBuf {
    home.path().join(format!("{name}-{tenant}"))
}

/// Puts a key file in place of an older one.
fn new_key(part: &FsPath, home: &FsPath, byte: u8) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::write(part, [byte; 32]).expect("write");
    fs::set_permissions(part, fs::Permissions::from_mode(0o600)).expect("mode");
    fs::rename(part, home.join("s3.key")).expect("rename");
}

#[test]
fn what_is_not_signed_by_its_tenant_is_refused_as_aws_does() {
    let Some(python) = s3_python() else { return };
    let tenants = Tenants::start();
    let mut c = Command::new(python);
    c.arg(repo().join("tests/s3/signatures.py")).arg("-q").envs(tenants.variables("a"));
    c.env("KEY", "set-a/one.txt").env("FOREIGN", "set-b/one.txt").env("PYTHONDONTWRITEBYTECODE", "1");
    run(&mut c);
    let log = tenants.site.log();
    assert!(!log.contains("Signature=") && !log.contains("X-Amz"), "no signature and no query in the log");
    let secret = &tenants.variables("a")["AWS_SECRET_ACCESS_KEY"];
    assert!(!log.contains(secret.as_str()), "no secret in the log");
}

#[test]
fn credentials_end_with_their_token_and_with_the_key() {
    let tenants = Tenants::start();
    let (a, b) = (tenants.store("a"), tenants.store("b"));
    let (of_a, of_b) = (Path::from("set-a/one.txt"), Path::from("set-b/one.txt"));
    let runtime = runtime();
    let reads = |store: &AmazonS3, key: &Path| runtime.block_on(get(store, key)).map(|bytes| bytes.len());
    assert_eq!(reads(&a, &of_a).expect("its own"), 9000);
    assert_eq!(reads(&b, &of_b).expect("its own"), 9000);
    assert!(matches!(reads(&a, &of_b), Err(object_store::Error::NotFound { .. })), "foreign is absent");
    let status = stdout(&run(tenants.fletch("a").arg("status")));
    assert!(status.contains("s3     http://127.0.0.1:"), "{status}");

    run(tenants.fletch("a").args(["unregister", "set-a"]));
    assert!(matches!(reads(&a, &of_a), Err(object_store::Error::NotFound { .. })), "unregistered is absent");

    // Without the token of b, whose rows are the second of the file.
    let tokens = fs::read_to_string(tenants.path("tokens.toml")).expect("tokens");
    let first = tokens.split_inclusive("[[token]]").take(2).collect::<String>();
    let first = first.trim_end_matches("[[token]]");
    fs::write(tenants.path("part"), first).expect("write");
    fs::rename(tenants.path("part"), tenants.path("tokens.toml")).expect("rename");
    until("b is refused", Duration::from_secs(5), || reads(&b, &of_b).is_err());
    let told = reads(&b, &of_b).expect_err("refused").to_string();
    assert!(told.contains("InvalidAccessKeyId"), "{told}");
    let list = || runtime.block_on(a.list(None).try_collect::<Vec<_>>());
    assert_eq!(list().expect("a goes on").len(), 0);

    new_key(&tenants.path("part"), tenants.home.path(), 8);
    until("the old key is gone", Duration::from_secs(5), || list().is_err());
    let told = list().expect_err("refused").to_string();
    assert!(told.contains("SignatureDoesNotMatch"), "{told}");
    let renewed = tenants.store("a");
    let listed = runtime.block_on(renewed.list(None).try_collect::<Vec<_>>());
    assert_eq!(listed.expect("new credentials").len(), 0);
}

#[test]
fn servers_with_one_key_take_each_others_credentials() {
    let Some(python) = s3_python() else { return };
    let tenants = Tenants::start();
    let other = secured(tenants.home.path());
    let mut register = tenants.fletch("a");
    register.env("FLETCH_SERVER", &other.url).args(["register", "set-a"]);
    register.arg(at_dir(&tenants.home, "data", "a")).arg("--tables").arg(at_dir(
        &tenants.home,
        "tables",
        "a",
    ));
    run(&mut register);
    let mut elsewhere = tenants.fletch("a");
    let printed = stdout(&run(elsewhere.env("FLETCH_SERVER", &other.url).args(["s3", "credentials"])));
    let url = printed.lines().find_map(|line| line.strip_prefix("export AWS_ENDPOINT_URL=")).expect("a URL");
    let mut c = Command::new(python);
    c.args([
        "-c",
        "import boto3; print(boto3.client('s3').get_object(Bucket='fletch', \
        Key='set-a/one.txt')['Body'].read().decode())",
    ]);
    c.envs(tenants.variables("a")).env("AWS_ENDPOINT_URL", url);
    assert_eq!(stdout(&run(&mut c)).trim(), "a".repeat(9000));
}

#[test]
fn a_server_of_a_cluster_serves_what_another_one_has_and_redirects_nobody() {
    if !have(&[Need::Etcd]) {
        return;
    }
    let (tree, tables) = (TempDir::new().expect("tree"), TempDir::new().expect("tables"));
    let bytes = noise(60 * 40_000);
    for (i, content) in bytes.chunks(40_000).enumerate() {
        fs::write(tree.path().join(format!("{i:02}")), content).expect("write");
    }
    let _ = index(tree.path(), tables.path(), &[]);
    let etcd = EtcdCluster::start(1);
    let mut servers = ["a", "b"].map(|id| ClusterServer::new(id, &etcd, &["--s3-listen=127.0.0.1:0"]));
    servers.iter_mut().for_each(ClusterServer::start);
    agreed(&[&servers[0], &servers[1]], "a:up b:up", Duration::from_secs(20));
    let [uri, at] = [tree.path(), tables.path()].map(|dir| dir.display().to_string());
    servers[0].register("d", &uri, &at, None);
    for server in &servers {
        let info = curl(&format!("{}/v1/info", server.url), &[]).1;
        let url = door(&serde_json::from_str(&info).expect("JSON"));
        until("the dataset is known", Duration::from_secs(5), || {
            curl(&format!("{url}/fletch?prefix=d/"), &[]).1.matches("<Key>").count() == 60
        });
        for (i, content) in bytes.chunks(40_000).enumerate() {
            let file = tree.path().join("got");
            let to = file.display().to_string();
            let (status, _) = curl(&format!("{url}/fletch/d/{i:02}"), &["-o", &to]);
            assert!(status == "200" && fs::read(&file).expect("its bytes") == content, "{i}: {status}");
        }
    }
    let of_peers = |server: &ClusterServer| {
        let metrics = server.text("/metrics");
        metrics.lines().any(|line| line.contains("component=\"s3\"") && line.contains("tier=\"peer\""))
    };
    assert!(servers.iter().any(of_peers), "some bytes came through the server that owns them");
}

#[test]
fn a_server_with_tokens_and_no_key_says_how_to_make_one() {
    let home = TempDir::new().expect("home");
    let tokens = home.path().join("tokens.toml").display().to_string();
    run(command("fletch-server").args(["token", "new", "--tenant", "a", "--append", &tokens]));
    let start = |more: &[&str]| {
        let mut c = command("fletch-server");
        c.args(["--config-check", "--auth-tokens", &tokens, "--s3-listen", "127.0.0.1:0"]).args(more);
        c.env("HOME", home.path());
        let out = c.output().expect("runs");
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, told) = start(&[]);
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("s3.listen") && told.contains("head -c 32 /dev/urandom"), "{told}");
    assert_eq!(start(&["--s3-key-file", "/some/key"]).0, Some(0));
}
