// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	bolt "go.etcd.io/bbolt"

	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var (
	vf1 = function.ID{Address: "0000:3b:02.1"}
	vf2 = function.ID{Address: "0000:3b:02.2"}
	sf  = function.SubfunctionID("0000:3b:00.0", 88)
)

func open(t testing.TB, path string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

// full returns an attachment with all fields set.
func full(id function.ID) journal.Attachment {
	return journal.Attachment{
		Function: id, PF: "0000:3b:00.0", PFName: "ens3f0", VFIndex: 1,
		Claim: journal.Claim{Namespace: "default", Name: "c", UID: "claim-1", Request: "nic",
			Pool: "p", Device: "0000-3b-02-1"},
		Pod:      journal.Pod{Namespace: "default", Name: "pod", UID: "pod-1"},
		Resource: "xpu.opiproject.org/fast",
		Port:     &journal.Port{DevicePool: "fast", Network: "blue", MAC: "02:00:00:00:00:01"},
		CNI: &journal.CNI{ContainerID: "sandbox-1", IfName: "net1", Network: "blue-net",
			IPAM: []byte(`{"ips":[]}`)},
		Interface: function.Interface{
			Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01",
			Addresses: []netip.Prefix{
				netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64"),
			},
			Routes: []function.Route{{
				To: netip.MustParsePrefix("10.2.0.0/16"), Via: netip.MustParseAddr("10.1.0.1"),
				Metric: 5,
			},
				{To: netip.MustParsePrefix("10.3.0.0/16")}},
			VF: &function.VFConfig{VLAN: new(100), QoS: new(3), Proto: "802.1ad", Trust: new(true),
				SpoofCheck: new(false),
				MinTxRate:  new(1), MaxTxRate: new(100), LinkState: "auto"},
		},
		State: journal.Attached, ReservedAt: time.Unix(1e9, 0).UTC(), Sandbox: "sandbox-1",
		BootID: "boot-1",
		Place:  netdev.Place{NetNS: "/run/netns/x", Cookie: 1<<63 + 7, Index: 12},
		Before: &netdev.Snapshot{
			Name: "ens3f0v1", AltNames: []string{"enp59s0v1"}, Alias: "rack 7", MTU: 1500,
			MAC: "02:00:00:00:00:02", TxQLen: 1000,
			Up: true, NoARP: true, Promiscuous: true, AllMulticast: true,
			VF: &netdev.VFState{MAC: "00:00:00:00:00:00", VLAN: 1, QoS: 2, Proto: "802.1q",
				MinTxRate: 3, MaxTxRate: 4,
				SpoofCheck: new(true), Trust: new(false), LinkState: "disable"},
			Identity: netdev.Identity{Index: 12, Kind: "device", Parent: "0000:3b:02.1", Bus: "pci",
				Permanent: "02:00:00:00:00:03", Peer: 3, PeerNS: -1},
		},
		Observed: &netdev.Observed{Name: "net1", MAC: "02:00:00:00:00:01", MTU: 1400, Index: 12,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")}},
		AttachedAt: time.Unix(1e9+1, 0).UTC(), StoppedAt: time.Unix(1e9+2, 0).UTC(),
	}
}

func reserved(id function.ID) journal.Attachment { return full(id).BackToReserved() }

var comparePrefixes = cmp.Options{
	cmp.Comparer(func(a, b netip.Prefix) bool {
		return a == b
	}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
}

func TestKeepsEverything(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "journal.db")
	j := open(t, path)
	want := []journal.Attachment{full(sf), restored(), reserved(vf2)}
	want[2].Claim.UID, want[2].Pod.UID = "claim-2", "pod-2"
	for _, a := range want {
		must.Succeed(t, j.Put(a))
	}

	check := func(j *journal.Journal) {
		t.Helper()
		if diff := cmp.Diff(want, j.All(), comparePrefixes); diff != "" {
			t.Errorf("all (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(want[:2], j.ByClaim("claim-1"), comparePrefixes); diff != "" {
			t.Errorf("by claim (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(want[2:], j.ByPod("pod-2"), comparePrefixes); diff != "" {
			t.Errorf("by pod (-want +got):\n%s", diff)
		}
	}

	check(j)
	must.Succeed(t, j.Close())
	j = open(t, path)
	check(j)

	must.Succeed(t, j.Delete(vf1))
	must.Succeed(t, j.Delete(vf1))
	if _, ok := j.Get(vf1); ok {
		t.Error("still there after delete")
	}

	must.Succeed(t, j.Close())
	if _, ok := open(t, path).Get(vf1); ok {
		t.Error("there again after delete and open")
	}

	for _, p := range []string{path, filepath.Dir(path)} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v, %v: others may use it", p, info.Mode(), err)
		}
	}
}

// TestUnknownOwners checks that records without a claim or a pod belong to none, and not to the one
// without a UID.
func TestUnknownOwners(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "journal.db"))
	unknown := reserved(vf1)
	unknown.Claim, unknown.Pod = journal.Claim{}, journal.Pod{}
	must.Succeed(t, j.Put(unknown))
	if byClaim, byPod := j.ByClaim(""), j.ByPod(""); len(byClaim)+len(byPod) > 0 {
		t.Errorf("by claim %v, by pod %v", byClaim, byPod)
	}
}

func TestPutRefuses(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "j"))
	broken := map[string]func(*journal.Attachment){
		"function: is empty": func(a *journal.Attachment) {
			a.Function = function.ID{}
		},
		`state "": is unknown`:                func(a *journal.Attachment) { a.State = "" },
		"state Attached: before and observed": func(a *journal.Attachment) { a.Observed = nil },
		"state Lost: before and observed": func(a *journal.Attachment) {
			a.State, a.Before = journal.Lost, nil
		},
		"state Reattaching: before and obser": func(a *journal.Attachment) {
			a.State, a.Observed = journal.Reattaching, nil
		},
		"state Attaching: before must be the": func(a *journal.Attachment) {
			a.State, a.Before = journal.Attaching, nil
		},
		"state Attached: restoredAt and hooks": func(a *journal.Attachment) {
			a.RestoredAt = time.Unix(1e9, 0)
		},
		"state Reserved: restoredAt and hooks": func(a *journal.Attachment) {
			a.State, a.Hooks = journal.Reserved, &journal.Hooks{}
		},
	}

	for want, breakIt := range broken {
		a := full(vf1)
		breakIt(&a)
		if err := j.Put(a); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}

	if got := j.All(); len(got) != 0 {
		t.Errorf("kept %v", got)
	}
}

// A write to a closed journal fails and does not appear in reads.
func TestFailedWriteIsNotKept(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "j"))
	must.Succeed(t, j.Put(reserved(vf1)))
	must.Succeed(t, j.Close())
	if err := j.Put(full(vf1)); err == nil {
		t.Error("put on a closed journal succeeded")
	}
	if a, _ := j.Get(vf1); a.State != journal.Reserved {
		t.Errorf("state %s, want what is on the disk", a.State)
	}
}

func TestOpenLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	open(t, path)
	if _, err := journal.Open(path); !errors.Is(err, boltfile.ErrLocked) ||
		!strings.Contains(err.Error(), path) {
		t.Errorf("error %v, want %v with the path", err, boltfile.ErrLocked)
	}
}

func TestOpenDamaged(t *testing.T) {
	intact := func(t *testing.T) (path string, content []byte) {
		path = filepath.Join(t.TempDir(), "j")
		j := open(t, path)
		for n := range uint32(64) { // several pages
			must.Succeed(t, j.Put(full(function.SubfunctionID("0000:3b:00.0", n))))
		}

		must.Succeed(t, j.Close())
		content, err := os.ReadFile(path)
		must.Succeed(t, err)

		return path, content
	}

	damages := map[string]func([]byte) []byte{
		"garbage": func(b []byte) []byte {
			return []byte(strings.Repeat("not a journal ", 1000))
		},
		"short":       func(b []byte) []byte { return b[:100] },
		"meta lost":   func(b []byte) []byte { clear(b[:8192]); return b },
		"data zeroed": func(b []byte) []byte { clear(b[8192:]); return b },
		"data garbled": func(b []byte) []byte {
			for i := 8192; i < len(b); i += 3 {
				b[i] ^= 0x55
			}
			return b
		},
		"truncated": func(b []byte) []byte { return b[:8192] },
	}

	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			path, content := intact(t)
			must.Succeed(t, os.WriteFile(path, damage(content), 0o600))
			j, err := journal.Open(path)
			if err == nil {
				t.Fatalf("opened, with %d attachments", len(j.All()))
			}
			if !errors.Is(err, boltfile.ErrCorrupt) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want %v with the path", err, boltfile.ErrCorrupt)
			}

			must.Succeed(t, os.Rename(path, path+".damaged"))
			must.Succeed(t, open(t, path).Put(full(vf1)))
		})
	}
}

// TestOpenWithoutBucket: a journal that lacks a bucket is refused.
func TestOpenWithoutBucket(t *testing.T) {
	for _, bucket := range []string{"meta", "attachments"} {
		path := filepath.Join(t.TempDir(), "j")
		must.Succeed(t, open(t, path).Close())
		db, err := bolt.Open(path, 0o600, nil)
		must.Succeed(t, err)
		must.Succeed(t, db.Update(func(tx *bolt.Tx) error {
			return tx.DeleteBucket([]byte(bucket))
		}))
		must.Succeed(t, db.Close())
		if _, err := journal.Open(path); !errors.Is(err, boltfile.ErrCorrupt) {
			t.Errorf("without %s: error %v, want %v", bucket, err, boltfile.ErrCorrupt)
		}
	}
}

// TestIsVF: a PF enforces properties for its VFs only.
func TestIsVF(t *testing.T) {
	vf := journal.Attachment{
		Function: function.ID{Address: "0000:3b:02.1"}, PF: "0000:3b:00.0", VFIndex: 1,
	}
	for name, test := range map[string]struct {
		change func(*journal.Attachment)
		want   bool
	}{
		"VF":             {func(*journal.Attachment) {}, true},
		"VF 0":           {func(a *journal.Attachment) { a.VFIndex = 0 }, true},
		"PF":             {func(a *journal.Attachment) { a.PF = a.Function.Address }, false},
		"SF":             {func(a *journal.Attachment) { a.Function.Subfunction = "sf1" }, false},
		"unknown PF":     {func(a *journal.Attachment) { a.PF = "" }, false},
		"not a VF of it": {func(a *journal.Attachment) { a.VFIndex = -1 }, false},
	} {
		a := vf
		test.change(&a)
		if a.IsVF() != test.want {
			t.Errorf("%s: %t", name, a.IsVF())
		}
	}
}

// TestBackToReserved: once the netdev is back, a claim's Function is as the claim asks for it
// again, whatever a CNI request changed. A Function without a claim stays as its request asks for
// it.
func TestBackToReserved(t *testing.T) {
	claims := function.Interface{Name: "net1", MTU: 9000}
	requests := function.Interface{Name: "eth7", MTU: 1400}
	for name, test := range map[string]struct {
		cni  *journal.CNI
		want function.Interface
	}{
		"a claim's, by a CNI request": {&journal.CNI{ContainerID: "c1", Claimed: &claims}, claims},
		"a CNI request's":             {&journal.CNI{ContainerID: "c1"}, requests},
		"neither":                     {nil, requests},
	} {
		a := full(vf1)
		a.CNI, a.Interface = test.cni, requests
		got := a.BackToReserved()
		if diff := cmp.Diff(test.want, got.Interface,
			cmpopts.EquateComparable(netip.Prefix{})); diff != "" || got.State != journal.Reserved {
			t.Errorf("%s: %s, interface (-want +got):\n%s", name, got.State, diff)
		}
		if claimed := test.cni != nil && test.cni.Claimed != nil; claimed == (got.CNI != nil) &&
			test.cni != nil {
			t.Errorf("%s: the request is %+v", name, got.CNI)
		}
	}
}

func TestRestored(t *testing.T) {
	at := time.Unix(1e9, 0)
	for _, test := range []struct {
		a    journal.Attachment
		want bool
	}{
		{journal.Attachment{State: journal.Releasing, RestoredAt: at}, true},
		{journal.Attachment{State: journal.Releasing}, false},
		{journal.Attachment{State: journal.Detaching, RestoredAt: at}, false},
	} {
		if test.a.Restored() != test.want {
			t.Errorf("%s, %v: %t", test.a.State, test.a.RestoredAt, test.a.Restored())
		}
	}
}

func TestOpenForeignContent(t *testing.T) {
	tests := []struct {
		name, bucket, key, value, err string
		corrupt                       bool
	}{
		{name: "bad schema", bucket: "meta", key: "schema", value: "x", err: `schema version "x"`,
			corrupt: true},
		{name: "no JSON", bucket: "attachments", key: "0000:3b:02.1", value: "{",
			err: `record "0000:3b:02.1"`, corrupt: true},
		{name: "other key", bucket: "attachments", key: "0000:3b:02.2",
			value: `{"function":"0000:3b:02.1"}`, err: "is about Function", corrupt: true},
		{name: "dead letter", bucket: "deadLetters", key: "12345678", value: `{"attachment":{}}`,
			err: "dead letter 3132333435363738: attachment: function: is empty", corrupt: true},
		{name: "dead letter's key", bucket: "deadLetters", key: "1", value: `{}`,
			err: "has 1 bytes", corrupt: true},
		{name: "unknown state", bucket: "attachments", key: "0000:3b:02.1",
			value: `{"function":"0000:3b:02.1","state":"X"}`,
			err:   `state "X": is unknown to this version`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "j")
			must.Succeed(t, open(t, path).Close())
			db, err := bolt.Open(path, 0o600, nil)
			must.Succeed(t, err)
			must.Succeed(t, db.Update(func(tx *bolt.Tx) error {
				return tx.Bucket([]byte(test.bucket)).Put([]byte(test.key), []byte(test.value))
			}))
			must.Succeed(t, db.Close())
			_, err = journal.Open(path)
			if err == nil || !strings.Contains(err.Error(), test.err) ||
				errors.Is(err, boltfile.ErrCorrupt) != test.corrupt {
				t.Errorf("error %v, want one with %q, corrupt %v", err, test.err, test.corrupt)
			}
		})
	}
}

// TestVersions: a file of the last version is read and migrated. A file of a newer version is read,
// and left as it is, if it says that this version may read it.
func TestVersions(t *testing.T) {
	// This file is from an agent that did not write which versions may read it.
	before, err := os.ReadFile("testdata/schema-1.db")
	must.Succeed(t, err)

	for name, test := range map[string]struct {
		// schema is the schema in the file; "" leaves it as it is.
		schema string
		err    string
	}{
		"the version before":                 {},
		"a newer one that this one may read": {schema: "2/1"},
		"a newer one that this one may not read": {
			schema: "3/2", err: "a newer agent wrote it; go back",
		},
		"a newer one that does not say": {
			schema: "2", err: "schema version 2, this program knows 1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "j")
			must.Succeed(t, os.WriteFile(path, before, 0o600))
			want := setSchema(t, path, test.schema)
			j, err := journal.Open(path)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) ||
					errors.Is(err, boltfile.ErrCorrupt) {
					t.Errorf("error %v, want one with %q that does not call the file corrupt",
						err, test.err)
				}
				return
			}

			must.Succeed(t, err)
			if diff := cmp.Diff([]journal.Attachment{full(vf1)}, j.All(),
				cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}),
				cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("records: -want +got\n%s", diff)
			}

			must.Succeed(t, j.Close())
			if got := setSchema(t, path, ""); got != want {
				t.Errorf("the file has schema %q afterwards, want %q", got, want)
			}
		})
	}
}

// setSchema sets the schema of a file, unless it is "", and returns the resulting schema.
func setSchema(t *testing.T, path, schema string) (has string) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	must.Succeed(t, err)

	must.Succeed(t, db.Update(func(tx *bolt.Tx) error {
		meta := tx.Bucket([]byte("meta"))
		if schema != "" {
			must.Succeed(t, meta.Put([]byte("schema"), []byte(schema)))
		}
		has = string(meta.Get([]byte("schema")))
		return nil
	}))

	must.Succeed(t, db.Close())
	return has
}

// TestKilled ends a process that writes continuously, by SIGKILL. The file must have at least the
// data whose writes had returned.
func TestKilled(t *testing.T) {
	const path = "XPU_TEST_JOURNAL"
	if p := os.Getenv(path); p != "" {
		j := open(t, p)
		for n := 1; ; n++ {
			a := full(vf1)
			a.VFIndex = n
			must.Succeed(t, j.Put(a))
			if _, err := os.Stdout.Write([]byte{'.'}); err != nil {
				return
			}
		}
	}

	file := filepath.Join(t.TempDir(), "j")
	for round := range 5 {
		writer := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilled$")
		writer.Env = append(os.Environ(), path+"="+file)
		dots, err := writer.StdoutPipe()
		must.Succeed(t, err)
		must.Succeed(t, writer.Start())
		acknowledged := 0
		buffer := make([]byte, 64)
		for acknowledged < 20+7*round {
			n, err := dots.Read(buffer)
			if err != nil {
				t.Fatalf("writer: %v after %d writes", err, acknowledged)
			}
			acknowledged += n
		}

		must.Succeed(t, writer.Process.Kill())
		_ = writer.Wait() // "signal: killed"
		j := open(t, file)
		if a, ok := j.Get(vf1); !ok || a.VFIndex < acknowledged {
			t.Errorf("round %d: write %d is the last one kept, want at least %d", round, a.VFIndex,
				acknowledged)
		}

		must.Succeed(t, j.Close())
	}
}

// TestLockTooLate: a caller that has given up does not get a lock that becomes free.
func TestLockTooLate(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "j"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	for range 100 {
		if unlock, err := j.Lock(ctx, vf1); !errors.Is(err, context.Canceled) {
			unlock()
			t.Fatalf("error %v, want %v", err, context.Canceled)
		}
	}

	unlock, err := j.Lock(t.Context(), vf1)
	must.Succeed(t, err)
	unlock()
}

func TestLock(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "j"))
	var holders, most atomic.Int32
	count := 0 // guarded by the lock
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 200 {
				unlock, err := j.Lock(t.Context(), vf1)
				if err != nil {
					t.Error(err)
					return
				}

				most.Store(max(most.Load(), holders.Add(1)))
				count++
				holders.Add(-1)
				unlock()
			}
		})
	}

	group.Wait()
	if count != 8*200 || most.Load() != 1 {
		t.Errorf("%d of %d entered, up to %d at once", count, 8*200, most.Load())
	}

	unlock, err := j.Lock(t.Context(), vf1)
	must.Succeed(t, err)
	other, err := j.Lock(t.Context(), vf2) // another Function does not wait
	must.Succeed(t, err)
	other()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the kubelet gave up"))
	if _, err := j.Lock(ctx, vf1); err == nil ||
		!strings.Contains(err.Error(), "0000:3b:02.1: the kubelet gave up") {
		t.Errorf("error %v, want the cause with the Function", err)
	}

	unlock()
	unlock, err = j.Lock(t.Context(), vf1)
	must.Succeed(t, err)
	unlock()
}

func BenchmarkPut(b *testing.B) {
	// The directory is in the working directory, because a temporary directory may be on a file
	// system without a disk.
	dir, err := os.MkdirTemp(".", "bench")
	must.Succeed(b, err)
	b.Cleanup(func() { os.RemoveAll(dir) })

	j := open(b, filepath.Join(dir, "j"))
	for n := range 256 {
		must.Succeed(b, j.Put(full(function.SubfunctionID("0000:3b:00.0", uint32(n)))))
	}

	a := full(vf1)
	for b.Loop() {
		must.Succeed(b, j.Put(a))
	}
}

// BenchmarkTwoSyncedPages is the measure for [BenchmarkPut]: two writes of a page with fdatasync,
// which is the least that a commit of bbolt needs.
func BenchmarkTwoSyncedPages(b *testing.B) {
	f, err := os.CreateTemp(".", "bench")
	must.Succeed(b, err)
	b.Cleanup(func() { f.Close(); os.Remove(f.Name()) })

	page := make([]byte, 4096)
	for b.Loop() {
		for range 2 {
			_, err := f.WriteAt(page, 0)
			must.Succeed(b, err)
			must.Succeed(b, f.Sync())
		}
	}
}

// However a file is damaged, Open returns an error or a journal that can be read, and does not end
// the process.
func TestOpenRandomDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	j := open(t, path)
	for n := range uint32(64) {
		must.Succeed(t, j.Put(full(function.SubfunctionID("0000:3b:00.0", n))))
	}

	must.Succeed(t, j.Close())
	intact, err := os.ReadFile(path)
	must.Succeed(t, err)
	random := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for range 400 {
		content := bytes.Clone(intact)
		for range 1 + random.IntN(40) {
			// Damage in the headers of pages has the worst effects.
			at := random.IntN(len(content)/4096)*4096 + random.IntN(64)
			content[at] = byte(random.IntN(256))
		}

		must.Succeed(t, os.WriteFile(path, content, 0o600))
		j, err := journal.Open(path)
		if err != nil {
			refused++
			continue
		}

		j.All()
		must.Succeed(t, j.Close())
	}

	if refused == 0 {
		t.Error("no damage was found")
	}

	t.Logf("%d of 400 refused", refused)
}

// TestFlippedBits: a journal with a flipped bit is either refused, with its path and what to do, or
// has the same content as before.
func TestFlippedBits(t *testing.T) {
	path := filepath.Join(must.MemoryDir(t), "j")
	j := open(t, path)
	for n := range uint32(150) { // enough records for branch pages
		must.Succeed(t, j.Put(full(function.SubfunctionID("0000:3b:00.0", n))))
	}

	want := j.All()
	must.Succeed(t, j.Close())
	intact, err := os.ReadFile(path)
	must.Succeed(t, err)

	random := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for range 100 {
		content, bit := bytes.Clone(intact), random.IntN(8*len(intact))
		content[bit/8] ^= 1 << (bit % 8)
		must.Succeed(t, os.WriteFile(path, content, 0o600))
		j, err := journal.Open(path)
		if err != nil {
			if !errors.Is(err, boltfile.ErrCorrupt) || !strings.Contains(err.Error(), path) ||
				!strings.Contains(err.Error(), "move it away") {
				t.Fatalf("bit %d: error %v, want %v with the path and what to do", bit, err,
					boltfile.ErrCorrupt)
			}
			refused++
			continue
		}

		if got := j.All(); !reflect.DeepEqual(want, got) {
			t.Fatalf("bit %d: -want +got\n%s", bit, cmp.Diff(want, got, comparePrefixes))
		}

		must.Succeed(t, j.Close())
	}

	if refused == 0 {
		t.Error("no damage was found")
	}

	t.Logf("%d of 100 refused", refused)
}
