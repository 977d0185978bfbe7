// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr/funcr"

	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestFollowCredentials checks that changed files are used, each change once, and that other
// changes in their directory, such as a growing log, have no effect.
func TestFollowCredentials(t *testing.T) {
	dir := t.TempDir()
	files := CredentialFiles{
		Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"),
		ClientCA:      filepath.Join(dir, "ca.crt"),
		Authorization: filepath.Join(dir, "authorization.yaml"),
	}

	authority := opitest.NewAuthority(t)
	write := func(path string, content []byte) {
		t.Helper()
		// A rename, because Follow would also read a file that is half written.
		next := filepath.Join(t.TempDir(), "next")
		must.Succeed(t, os.WriteFile(next, content, 0o600))
		must.Succeed(t, os.Rename(next, path))
	}

	issue := func() {
		cert, key := authority.Issue(t, "opi-bridge")
		write(files.Key, key)
		write(files.Cert, cert)
	}

	write(files.ClientCA, authority.PEM())
	write(files.Authorization, []byte("rules: []"))
	issue()
	credentials, err := OpenCredentials(files)
	must.Succeed(t, err)

	var mutex sync.Mutex
	logFile, err := os.Create(filepath.Join(dir, "opi-bridge.log"))
	must.Succeed(t, err)
	defer logFile.Close()

	var logged []string
	log := funcr.New(func(_, args string) {
		mutex.Lock()
		defer mutex.Unlock()
		logged = append(logged, args)
		_, err := logFile.WriteString(args + "\n")
		must.Succeed(t, err)
	}, funcr.Options{})

	count := func(text string) (n int) {
		mutex.Lock()
		defer mutex.Unlock()
		for _, line := range logged {
			if strings.Contains(line, text) {
				n++
			}
		}
		return n
	}

	stop := must.Run(t, func(ctx context.Context) error { return credentials.Follow(ctx, log) })
	defer stop()

	const read, kept = "credentials read", "credentials stay as they were"
	first := credentials.current.Load()
	issue()
	must.Eventually(t, "the new certificate is used", func() bool {
		return credentials.current.Load() != first && count(read) > 0
	})
	write(files.Authorization, []byte("rules: [{}]"))
	must.Eventually(t, "the error is logged", func() bool { return count(kept) > 0 })
	write(files.Authorization, []byte("rules: [{subject: CN=a}]"))
	must.Eventually(t, "the rules are used", func() bool {
		return len(credentials.current.Load().authorization.Rules) == 1 && count(read) > 1
	})
	if count(read) != 2 || count(kept) != 1 {
		t.Errorf("logged %q, want %q twice and %q once", logged, read, kept)
	}
}

func TestOpenCredentials(t *testing.T) {
	dir := t.TempDir()
	cert, key := opitest.NewAuthority(t).Issue(t, "opi-bridge")
	missing := filepath.Join(dir, "missing")

	paths := map[string][]byte{
		"tls.crt": cert, "tls.key": key, "ca.crt": cert, "rules.yaml": []byte("rules: [{}]"),
		"empty": nil,
	}

	for name, content := range paths {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
	}

	at := func(name string) string { return filepath.Join(dir, name) }
	for name, test := range map[string]struct {
		files CredentialFiles
		says  string
	}{
		"no key": {
			CredentialFiles{Cert: at("tls.crt"), Key: missing, ClientCA: at("ca.crt")}, missing,
		},
		"key is no key": {
			CredentialFiles{Cert: at("tls.crt"), Key: at("empty"), ClientCA: at("ca.crt")},
			at("empty"),
		},
		"CA is none": {
			CredentialFiles{Cert: at("tls.crt"), Key: at("tls.key"), ClientCA: at("empty")},
			at("empty"),
		},
		"rules are wrong": {
			CredentialFiles{Cert: at("tls.crt"), Key: at("tls.key"), ClientCA: at("ca.crt"),
				Authorization: at("rules.yaml")}, at("rules.yaml"),
		},
		"rules are not there": {
			CredentialFiles{Cert: at("tls.crt"), Key: at("tls.key"), ClientCA: at("ca.crt"),
				Authorization: missing}, missing,
		},
	} {
		_, err := OpenCredentials(test.files)
		if err == nil || !strings.Contains(err.Error(), test.says) ||
			strings.Contains(err.Error(), "PRIVATE") {
			t.Errorf("%s: error %v, want one that names %s", name, err, test.says)
		}
	}

	if _, err := OpenCredentials(CredentialFiles{Cert: missing}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want %v", err, os.ErrNotExist)
	}
}
