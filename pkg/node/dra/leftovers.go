// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
)

const (
	// MetadataFiles is the pattern of the library's CDI files.
	MetadataFiles = metadataPrefix + "*.json"
	// metadataPrefix is their prefix. The claim's UID follows.
	metadataPrefix = v1alpha1.GroupName + "_metadata_"
	leftoversEvery = time.Minute
)

// RemoveLeftovers removes metadata files (KEP-5304) of claims that are not prepared, at once and
// every minute until ctx ends. The library writes them at the end of a Prepare (metadata.go in
// k8s.io/dynamic-resource-allocation/kubeletplugin), even if the claim was unprepared in the
// meantime. Files in driverDir have the claim's namespace and name in their path, and files in
// cdiDir its UID. copies has their copies.
func (d *Driver) RemoveLeftovers(
	ctx context.Context, driverDir, cdiDir string, copies *keep.Copies,
) error {
	for {
		if err := removeLeftovers(driverDir, cdiDir, copies, d.Journal.Claims); err != nil {
			d.Log.Error(err, "Files that nobody needs any more remain",
				"retry", leftoversEvery.String())
		}
		if !loop.Sleep(ctx, leftoversEvery) {
			return nil
		}
	}
}

func removeLeftovers(
	driverDir, cdiDir string, copies *keep.Copies, claims func() []journal.Claim,
) error {
	files, err1 := copies.Glob(filepath.Join(cdiDir, MetadataFiles))
	// files of an agent that was killed
	unfinished, err2 := copies.Unfinished(MetadataFiles)
	directories, err3 := filepath.Glob(filepath.Join(driverDir, "dra-device-metadata", "*_*"))
	errs := []error{err1, err2, err3}
	// The journal must be read after the directories, because it has a claim before the claim's
	// files are written.
	prepared := map[string]bool{} // by UID, and by the name of the directory
	for _, c := range claims() {
		prepared[string(c.UID)], prepared[c.Namespace+"_"+c.Name] = true, true
	}

	for _, path := range files {
		if !prepared[claimOf(path)] {
			if err := copies.Remove(path); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	for _, path := range slices.Concat(unfinished, directories) {
		if !prepared[claimOf(path)] {
			errs = append(errs, os.RemoveAll(path)) // no error if it is gone already
		}
	}

	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("metadata of claims that are gone: %w", err)
	}

	return nil
}

// claimOf returns the UID of the claim of a file, or the name of a directory.
func claimOf(path string) string {
	name := filepath.Base(path)
	ofFile, isFile := strings.CutPrefix(strings.TrimPrefix(name, "."), metadataPrefix)
	if !isFile {
		return name
	}
	uid, _, _ := strings.Cut(ofFile, "_")
	return uid
}
