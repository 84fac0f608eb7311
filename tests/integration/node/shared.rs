//! I3, I8: the first read of a chunk on a node serves all mounts. Every byte is counted where it was sent.

use crate::common::{Node, end, read_all};
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};

#[test]
fn two_cold_mounts_cost_the_server_one_dataset_and_a_restart_costs_nothing() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = Data::new(71, 400, 110_000);
    let node = Node::start();
    let _ = node.site.publish("d", &data.dir);
    let report = |job: &str| node.site.place("out").join(job);
    let with = |job: &str| ["--report".to_owned(), report(job).display().to_string()];
    let mount = |job: &str| node.mount("d", job, &with(job).each_ref().map(String::as_str));
    let (one, two) = (mount("one"), mount("two"));
    // Both at once, from opposite ends.
    std::thread::scope(|s| {
        s.spawn(|| node.read_to_keep(&one.dir, &data));
        s.spawn(|| {
            node.read_to_keep(&two.dir, &data.backwards());
        });
    });
    assert_eq!(node.sent(""), data.bytes(), "the server sent it once");
    let (of_one, of_two) = (node.sent("one"), node.sent("two"));
    assert!(of_one > 0 && of_two > 0, "in both names: {of_one} + {of_two}");
    node.settled(one.pid(), 400);

    // I8: what each handed to the kernel is the sum of where it had it from, and what the owner sent is
    // what the guest got.
    let two = end(two, &report("two"));
    let one = end(one, &report("one"));
    let n = |v: &serde_json::Value, key: &str| v[key].as_u64().unwrap_or_else(|| panic!("{key} in {v}"));
    for r in [&one, &two] {
        let parts = ["read_memory_bytes", "read_disk_bytes", "read_joined_bytes", "read_fetched_bytes"];
        assert_eq!(n(r, "read_bytes"), parts.iter().map(|p| n(r, p)).sum::<u64>(), "{r}");
        assert_eq!(n(r, "corrupt"), 0);
    }
    let sent = one["node"]["sent"].as_object().expect("sent").values();
    let sent: u64 = sent.map(|v| v.as_u64().expect("bytes")).sum();
    assert_eq!((sent, n(&two["node"], "left")), (n(&two["node"], "bytes"), 0), "{one}\n{two}");
    assert_eq!(n(&two, "fetched_bytes"), n(&two["node"], "bytes"), "the guest asked nobody else");
    assert_eq!(n(&one["node"]["sent"], "server"), of_two, "counted by the server under the guest's name");
    assert_eq!(one["node"]["role"], "owner");

    // Alone, and after its end: warm, without a byte of the server.
    let again = mount("again");
    read_all(&again.dir, &data);
    assert_eq!(node.sent(""), data.bytes());
    let again = end(again, &report("again"));
    assert_eq!(n(&again, "read_disk_bytes") + n(&again, "read_memory_bytes"), n(&again, "read_bytes"));
}

#[test]
fn versions_that_are_read_divide_the_store() {
    if !have(&[Need::Fuse]) {
        return;
    }
    // Each alone would fill it.
    let (a, b) = (Data::new(72, 350, 110_000), Data::new(73, 350, 110_000));
    let node = Node::of("32MiB", "32MiB");
    let _ = node.site.publish("a", &a.dir);
    let _ = node.site.publish("b", &b.dir);
    let one = node.mount("a", "one", &[]);
    node.read_to_keep(&one.dir, &a);
    let full = node.state().expect("an owner")["chunks"].as_u64().expect("chunks");
    assert!(full > 150, "{full}");
    let two = node.mount("b", "two", &[]);
    node.read_to_keep(&two.dir, &b);
    node.read_to_keep(&one.dir, &a);
    let before = node.sent("");
    read_all(&two.dir, &b);
    let spared = b.bytes() - (node.sent("") - before);
    let half = full / 2 * b.len;
    assert!(spared > half * 8 / 10 && spared < half * 12 / 10, "its half is {half}, {spared} were spared");
    drop((one, two));
}
