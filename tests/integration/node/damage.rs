//! I1: no mount returns bytes that changed on the owner's disk.

use crate::common::{Node, read_all};
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use std::fs;
use std::os::unix::fs::FileExt;

#[test]
fn damaged_records_cost_only_their_own_fetch() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let (n, len) = (300u64, 110_000u64);
    let data = Data::new(81, n, len);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let one = node.mount("d", "one", &[]);
    node.read_to_keep(&one.dir, &data);
    node.settled(one.pid(), n);
    // While it owns the store: every tenth record gets a flipped bit in the middle of its payload.
    let mut damaged = 0;
    for slab in fs::read_dir(node.stores()[0].join("slabs")).expect("slabs") {
        let path = slab.expect("entry").path();
        let bytes = fs::read(&path).expect("read");
        let file = fs::File::options().write(true).open(&path).expect("open");
        let records = (512..bytes.len()).step_by(64).filter(|&at| bytes[at..].starts_with(b"FLRC"));
        for at in records.step_by(10) {
            let at = at + 256 + len as usize / 2;
            file.write_all_at(&[bytes[at] ^ 1], at as u64).expect("flip");
            damaged += 1;
        }
    }
    assert!(damaged >= n / 10, "{damaged}");
    let before = node.sent("");
    let two = node.mount("d", "two", &[]);
    read_all(&two.dir, &data);
    read_all(&one.dir, &data);
    // What the owner's memory still had need not come from its disk.
    let again = (node.sent("") - before) / len;
    let found = node.state().expect("an owner")["quarantined"].as_u64().expect("a number");
    assert!(again <= damaged && found <= damaged, "{again} fetched again, {found} found, {damaged} damaged");
    node.appended();
    // The rest is found at the latest after a start.
    drop((one, two));
    let three = node.mount("d", "three", &[]);
    read_all(&three.dir, &data);
    let again = (node.sent("") - before) / len;
    assert_eq!(again, damaged, "each once");
    three.stop();
}
